"""Who imports whom, what is installed for it, and how quickly a script answers ``--help``."""

import ast
import graphlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each part of the library may import of the library. One package is one part, but for
# ``models``. A new module gets a line here.
MAY_IMPORT = {
    "atomic": "",
    "game": "",
    "fonts": "",
    "video": "",
    "yaml_tree": "",
    "config": "atomic game yaml_tree",
    "records": "atomic game",
    "language": "game",
    "vocabulary": "game",
    "motion": "game video",
    "checkpoint": "atomic config",
    "features": "atomic",
    "curves": "",
    "data": "config features game records",
    "game_data": "config data features game language records",
    "schedule": "config",
    "parallel": "config zero",
    "zero": "",
    "optimizer": "config parallel",
    "train_state": "checkpoint parallel",
    "training": "checkpoint config optimizer parallel schedule train_state training_log",
    "training_log": "atomic config",
    "models": "",
    "models.encoder": "config",
    "models.diffusion": "config",
    "models.patch_autoencoder": "config",
    "models.backbones": "checkpoint config models.patch_autoencoder",
    "models.decoder": "checkpoint config models.diffusion models.encoder",
    "models.decoder_files": "atomic checkpoint config models.decoder",
    "models.shot_model": "config data models.decoder models.diffusion models.encoder",
    "models.mistral": "config",
    "models.mllm": "config game game_data language models.mistral models.mllm_files",
    "models.mllm_files": "atomic checkpoint config language models.mistral",
    "models.state_model": "game_data models.encoder models.mllm",
    "models.skeleton": "config data game game_data language models.*",
    "step_memory": "",
    "play_plan": "config drawing game game_data models.* step_memory",
    "plan": "config models.* optimizer play_plan step_memory training",
    "validation": "config data models.* motion video",
    "pretraining": "atomic config data features models.* records video",
    "assembly": "atomic checkpoint config models.*",
    "convert": "assembly atomic checkpoint config game language models.*",
    "opening": "config video",
    "placement": "config",
    "drawing": "checkpoint config game models.* placement video",
    "saved_game": "atomic checkpoint config game opening video vocabulary",
    "storyboard": "fonts game saved_game vocabulary",
    "session": "checkpoint config drawing game language models.* opening placement video "
    "vocabulary",
    "evaluation": "atomic checkpoint config data drawing fonts game models.* motion records "
    "session video",
}

# Requirements that no file of ours imports, and who does.
INDIRECT = {
    "protobuf": "transformers, to read a sentencepiece model",
    "tensorboard": "torch.utils.tensorboard",
}

# Packages that one mode of training needs, and the extra of setup.py that installs each.
OPTIONAL = {"deepspeed": "deepspeed"}

HEAVY = {"torch", "transformers", "diffusers", "peft", "accelerate", "open_clip", "cv2", "decord"}


def module_name(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {
    module_name(path): path
    for folder in ("animegamer", "data_pipeline", "scripts", "game_demo", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
FILES |= {path.stem: path for path in sorted(ROOT.glob("inference_*.py"))}


def imports(path):
    """The dotted names that a file imports, inside functions too, but not for its types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If)]
    for_types = {
        id(node)
        for guard in guards
        if ast.unparse(guard.test) == "TYPE_CHECKING"
        for statement in guard.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_imports(path):
    """The modules of ours that a file imports."""
    found = set()
    for name in imports(path):
        while name and name not in FILES:
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found


def part_of(module):
    """``animegamer.evaluation.judge`` is of ``evaluation``; the package itself is of none."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["models"] else 1])


LIBRARY = sorted(name for name in FILES if name.startswith("animegamer."))


@pytest.mark.parametrize("module", LIBRARY)
def test_a_module_imports_only_what_the_table_allows(module):
    part = part_of(module)
    assert part in MAY_IMPORT, f"no line for {part!r} in MAY_IMPORT"
    allowed = set(MAY_IMPORT[part].split()) | {part, ""}
    for other in our_imports(FILES[module]):
        assert other.startswith("animegamer"), f"the library imports {other}"
        needed = part_of(other)
        package = needed.partition(".")[0] + ".*"
        assert needed in allowed or package in allowed, f"{module} imports {other}"


def test_the_table_has_no_dead_lines():
    assert set(MAY_IMPORT) == {part_of(module) for module in LIBRARY}


def test_no_module_needs_itself():
    graph = {name: our_imports(path) - {name} for name, path in FILES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_nobody_imports_the_scripts():
    for name, path in FILES.items():
        for other in our_imports(path):
            top = other.partition(".")[0]
            own = name.partition(".")[0] == top
            assert own or top in ("animegamer", "data_pipeline"), f"{name} imports {other}"


def test_only_benchmarks_use_the_reference_material_of_the_tests():
    users = {
        name.partition(".")[0]
        for name, path in FILES.items()
        if any(imported.partition(".")[0] == "tests" for imported in imports(path))
    }
    assert users <= {"benchmarks"}


def test_the_library_reads_no_command_line():
    for module in LIBRARY:
        names = set(imports(FILES[module]))
        assert "argparse" not in names and "sys.argv" not in names, module
        assert "sys.argv" not in FILES[module].read_text(encoding="utf-8"), module


def distribution(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    entries = [line.partition("#") for line in lines if line and not line.startswith("#")]
    for entry, _, why in entries:
        assert "==" in entry and why.strip(), f"{file}: {entry!r} needs a version and a reason"
    return {distribution(entry.partition("==")[0]) for entry, _, _ in entries}


def test_requirements_are_what_is_imported():
    ours = {name.partition(".")[0] for name in FILES}
    tops = {name.partition(".")[0] for path in FILES.values() for name in imports(path)}
    owners = importlib.metadata.packages_distributions()
    third_party = tops - ours - {"tests"} - set(sys.stdlib_module_names) - set(OPTIONAL)
    imported = {}
    for top in third_party:
        assert top in owners, f"{top!r} is imported, but not installed"
        imported[top] = {distribution(name) for name in owners[top]}
    requirements = pinned("requirements.txt")
    missing = [top for top, names in imported.items() if not names & requirements]
    assert not missing, f"imported, but not in requirements.txt: {missing}"
    unused = requirements - set().union(*imported.values()) - set(INDIRECT)
    assert not unused, f"in requirements.txt, but nobody imports it: {sorted(unused)}"


def test_setup_names_the_same_packages():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "setup"
    ]
    values = {k.arg: k.value for k in call.keywords}

    def names(node):
        return {distribution(name.partition(">=")[0]) for name in ast.literal_eval(node)}

    assert names(values["install_requires"]) == pinned("requirements.txt")
    extras = dict(
        zip(
            map(ast.literal_eval, values["extras_require"].keys),
            values["extras_require"].values,
            strict=True,
        )
    )
    assert names(extras["dev"]) == pinned("requirements-dev.txt")
    assert all(package in names(extras[extra]) for package, extra in OPTIONAL.items())


PROBE = """
import json, runpy, sys, time
sys.argv = sys.argv[1:]
code = 0
try:
    if sys.argv[0] == "import":
        __import__(sys.argv[1])
    elif sys.argv[0] == "module":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as exit:
    code = exit.code or 0
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print()
print(json.dumps({"code": code, "seconds": time.process_time(), "loaded": loaded}))
"""


def probe(*arguments):
    """Runs a file, a module or an import in a process of its own, and tells what that loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    text, _, report = done.stdout.strip().rpartition("\n")
    return text, json.loads(report)


@pytest.mark.parametrize(
    "module", ["", ".atomic", ".config", ".game", ".records", ".language", ".vocabulary"]
)
def test_import_is_light(module):
    _, report = probe("import", f"animegamer{module}")
    assert not HEAVY & set(report["loaded"])


SCRIPTS = [str(p.relative_to(ROOT)) for p in FILES.values() if p.parent.name == "scripts"]
SCRIPTS += [name + ".py" for name in FILES if name.startswith("inference_")]
MODULES = [name.removesuffix(".__main__") for name in FILES if name.endswith(".__main__")]
MODULES.append("benchmarks.gpu_check")


@pytest.mark.parametrize(
    "command",
    [(script,) for script in SCRIPTS] + [("module", name) for name in MODULES],
    ids=" ".join,
)
def test_help_is_quick_and_helpful(command):
    text, report = probe(*command, "--help")
    assert report["code"] == 0
    assert text.startswith("usage:")
    assert not HEAVY & set(report["loaded"])
    assert report["seconds"] < 1, "processor seconds until --help answered"
