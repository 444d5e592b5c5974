"""The READMEs: what they say to run exists and is spelt right, links lead somewhere, no gaps."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from animegamer import config

ROOT = Path(__file__).parents[1]
READMES = [
    "README.md",
    "game_demo/README.md",
    "checkpoints/README.md",
    "checkpoints/tiny/README.md",
]
# Scripts that take no --config on the command line, and the file that they read then.
DEFAULTS = {
    "inference_MLLM.py": "configs/tiny/play.yaml",
    "inference_Decoder.py": "configs/tiny/play.yaml",
    "evaluate.py": "configs/tiny/evaluate.yaml",
}


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(name), re.MULTILINE | re.DOTALL)
    return [content for kind, content in fenced if kind == language]


def commands(name):
    """Command lines of the shell blocks, comments and blank lines aside."""
    lines = "\n".join(blocks(name, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


COMMANDS = [(name, command) for name in READMES for command in commands(name)]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=lambda value: " ".join(value)[:70])
def test_a_command_names_what_exists(name, command):
    if "-m" in command and command[0] == "python":
        module = command[command.index("-m") + 1]
        assert importlib.util.find_spec(module), f"no module {module}"
    files = [word for word in command if re.search(r"\.(py|sh|yaml|toml)$|^\.ci/", word)]
    others = ("source", "tensorboard", "hf", "mv")
    assert files or "-m" in command or command[0] in others, command
    for file in files:
        assert (ROOT / file).is_file(), f"{name}: {' '.join(command)}: no {file}"


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=lambda value: " ".join(value)[:70])
def test_a_command_sets_what_can_be_set(name, command):
    overrides = [word for word in command if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    scripts = [Path(word).name for word in command if word.endswith(".py")]
    path = next((c for s in scripts for c in [DEFAULTS.get(s)] if c), None)
    if "--config" in command:
        path = command[command.index("--config") + 1]
    if path is not None or overrides:
        config.load(ROOT / path if path else None, overrides)


def test_there_are_commands():
    assert len(commands("README.md")) > 20


def slug(heading):
    """A heading's anchor, as code hosts make it."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return words.replace(" ", "-")


@pytest.mark.parametrize("name", READMES)
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(name))
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / name).parent / file if file else ROOT / name
        assert target.exists(), f"{name}: no {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{name}: no heading for {link}"


@pytest.mark.parametrize("name", READMES)
def test_no_figure_is_missing(name):
    gaps = [line for line in text_of(name).splitlines() if "FILL" in line]
    assert not gaps, f"{name}: {len(gaps)} lines with figures to fill in, such as: {gaps[0]}"


def test_the_tree_is_the_tree():
    (block,) = (b for b in blocks("README.md", "") if b.startswith("animegamer/"))
    parents = [ROOT]
    for line in block.splitlines():
        names = re.split(r" {2,}", line.lstrip("│├└─ "))[0]
        deep = line[0] in "│├└"
        for name in names.split(", "):
            path = parents[-1] / name if deep else ROOT / name
            assert path.exists(), f"the tree names {path.relative_to(ROOT)}"
        if not deep:
            parents = [ROOT / names]


def test_the_python_example_uses_what_exists():
    (block,) = blocks("README.md", "python")
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
    from animegamer.session import GameSession

    for method in set(re.findall(r"session\.(\w+)", block)):
        assert hasattr(GameSession, method), method


def test_every_figure_of_the_table_is_one_of_the_report():
    source = text_of("animegamer/evaluation/benchmark.py")
    for figure in re.findall(r"^\|[^|]+\| `(\w+)` \|", text_of("README.md"), re.MULTILINE):
        assert f'"{figure}"' in source, figure
