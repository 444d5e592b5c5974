#!/usr/bin/env bash
# Sets up .venv with the test tools and runs the tests; arguments go to pytest.
#   bash scripts/run_tests.sh                         the default tests
#   bash scripts/run_tests.sh tests/test_game.py -x   some of them
#   bash scripts/run_tests.sh -m slow                 the slow ones (others: gpu, weights)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh --dev
# The nets of the tests are tiny: many threads would wait for each other.
cores=$(.venv/bin/python -c 'import os; print(min(os.cpu_count() or 1, 2))')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
exec .venv/bin/python -m pytest "$@"
