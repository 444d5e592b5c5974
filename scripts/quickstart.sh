#!/usr/bin/env bash
# From a fresh clone to a played game: sets up .venv, predicts the demo's game states, draws its
# shots into results/demo and says where they lie. Needs no GPU and no download of weights.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh
cores=$(.venv/bin/python -c 'import os; print(min(os.cpu_count() or 1, 4))')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"

setup_seconds=$SECONDS
output=results/demo
.venv/bin/python inference_MLLM.py "play.output=$output"
.venv/bin/python inference_Decoder.py "play.output=$output"

echo
echo "Played in $((SECONDS - setup_seconds)) s (setting up took $setup_seconds s):"
for file in "$output"/game.json "$output"/storyboard.png "$output"/*.mp4; do
  if [ ! -s "$file" ]; then echo "missing: $file" >&2; exit 1; fi
  echo "  $PWD/$file"
done
