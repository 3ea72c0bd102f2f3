"""The pages say what is so: links, commands, variables and code in them exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import options_page
import pytest

from gemini_ft import errors
from gemini_ft.cli.main import COMMANDS
from gemini_ft.config import GeminiConfig, load_config, unknown_variables
from gemini_ft.core.placement import part_sizes, survival_probability
from gemini_ft.launch import endings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("README.md")])
REPORTS = sorted((ROOT / "benchmarks" / "results").glob("[0-9]*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=_name)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), target
        assert not anchor or anchor in _anchors(other), target


@pages
def test_python_is_python(page: Path) -> None:
    for block in _blocks(page, "python"):
        ast.parse(block)


@pages
def test_variables_are_read_somewhere(page: Path) -> None:
    options = {f"GEMINI_{name.upper()}" for name in GeminiConfig.model_fields}
    source = "".join(file.read_text() for folder in ("gemini_ft", "benchmarks/gpu") for file in (ROOT / folder).rglob("*.py"))
    for variable in set(re.findall(r"GEMINI_[A-Z_]*[A-Z]", page.read_text())):
        assert variable.partition("__")[0] in options or f'"{variable}"' in source, variable


@pages
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^make ([a-z-]+)", "\n".join(_blocks(page, "console")), re.MULTILINE)
    named += re.findall(r"`make ([a-z-]+)`", page.read_text())
    assert set(named) <= targets


@pages
def test_commands_exist(page: Path) -> None:
    fenced = "".join(_blocks(page, r"\w+"))
    assert set(re.findall(r"(?:^|bin/|[ \[])gemini,? ([a-z]+)", fenced, re.MULTILINE)) <= set(COMMANDS)


def test_the_table_of_options_is_current() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == options_page.page(), "python tests/kit/options_page.py writes it anew"


def test_the_table_of_pipeline_options_is_current() -> None:
    assert options_page.pipeline_table() in (ROOT / "docs" / "pipelines.md").read_text()


def test_every_variable_that_is_read_is_known() -> None:
    """Any other is warned of, with the nearest name."""
    source = "".join(file.read_text() for file in (ROOT / "gemini_ft").rglob("*.py"))
    read = set(re.findall(r'"(GEMINI_[A-Z_]*[A-Z])"', source))
    assert unknown_variables(dict.fromkeys(read, "")) == []


def test_every_status_is_in_the_table() -> None:
    """That of the launcher, and those of errors."""
    public = [value for name, value in vars(endings).items() if not name.startswith("_")]
    stated = {value for value in public if isinstance(value, int) and not isinstance(value, bool)}
    assert {endings.LEFT, endings.NOT_STORED} < stated
    stated |= {kind.exit_status for kind in vars(errors).values() if hasattr(kind, "exit_status")}
    table = (ROOT / "docs" / "launcher.md").read_text()
    assert {number for number in stated if not re.search(rf"^\| {number} \|", table, re.MULTILINE)} == set()


_TESTS = r"`(test_[a-z0-9_]+)`"
_FATES = r"^\| (?!.* what becomes of it )(?!.* \| the user's)(.*)\|$"  # what is the user's needs none
_WHOLE = r"(?s)^(.*?)\n\n"  # a part of one paragraph
# Page, the beginning of its part, and what stands at the beginning of each promise there.
PROMISES = {
    "the promise": ("failure_model.md", "## The promise", r"(?s)^(\*\*.*?)\n\n"),
    "what is tolerated": ("failure_model.md", "| failure | seen by", r"^\| (?!failure)(.*)\|$"),
    "what a shortage does": ("failure_model.md", "| what is short |", r"^\| (?!what is short)(.*)\|$"),
    "slow processes": ("failure_model.md", "| slow process |", r"^\| (?!slow process)(.*)\|$"),
    "storage": ("failure_model.md", "## Storage: what is promised", r"(?s)^(\*\*.*?)\n\n"),
    "stores": ("failure_model.md", "| store | promised", r"^\| (?!store)(.*)\|$"),
    "another user": ("security.md", "## Another user on the same host", r"(?s)^(- \*\*(?!He connects to the agent's TCP).*?)(?=^- |^$)"),
    "the network": ("security.md", "| he can | and then |", r"^\| (?!he can|cut or delay|open more of)(.*)\|$"),
    "members": ("security.md", "| a member that lies can | and then |", r"^\| (?!a member that|drain hosts|claim a newer)(.*)\|$"),
    "the bucket": ("security.md", "## An attacker who can write to the storage", _WHOLE),
    "two histories": ("failure_model.md", "## Two histories", _WHOLE),
    "protection on the way": ("security.md", "## An attacker on the network", r"(?s)^(\*\*.*?)\n\n"),
    "the switch": ("security.md", "## The switch", _WHOLE),
    "exit status": ("launcher.md", "| status | what has happened |", r"^\| (?!status)(.*)\|$"),
    "how a job ends": ("launcher.md", "| how the script has ended |", r"^\| (?!how the script)(.*)\|$"),
    "data of Lightning": ("lightning.md", "| state | what becomes", _FATES),
    "loaders of Lightning": ("lightning.md", "| moment | what becomes", _FATES),
    "callbacks of Lightning": ("lightning.md", "| callback | what becomes", _FATES),
    "plain loops": ("plain_loop.md", "## Models and optimizers", _FATES),
    "data of plain loops": ("plain_loop.md", "## Data", _FATES),
    "what else plain loops have": ("plain_loop.md", "## What else a script has", _FATES),
}


@pytest.mark.parametrize("part", PROMISES)
def test_each_promise_names_its_test(part: str) -> None:
    page, beginning, promise = PROMISES[part]
    text = (ROOT / "docs" / page).read_text().partition(beginning)[2]
    text = text.partition("\n\n" if beginning.startswith("|") else "\n## ")[0] + "\n\n"
    found = [match[1] for match in re.finditer(promise, text, re.MULTILINE) if set(match[1]) - {*"-| "}]
    assert len(found) >= (1 if promise == _WHOLE else 3)
    assert [each for each in found if not re.search(_TESTS, each)] == []


def test_each_error_that_was_mended_names_its_test() -> None:
    sections = re.findall(r"(?ms)^### Fixed\n(.*?)(?=^##|\Z)", (ROOT / "CHANGELOG.md").read_text())
    found = re.findall(r"(?ms)^- (.*?)(?=^- |^$|\Z)", "".join(sections))
    assert len(found) > 100
    assert [each for each in found if not re.search(_TESTS, each)] == []


# Of what was found, or is promised, these alone have tests that are too long for `make test`.
LONG = {
    "test_a_link_that_is_cut_in_the_middle_of_a_chunk",
    "test_a_spare_host_takes_the_place_of_a_lost_one",
    "test_a_trainer_on_ddp_with_the_callback_ends_with_the_very_bits",
    "test_batches_that_rank_0_fetches_for_all_come_again",
    "test_ends_with_the_same_bits",
    "test_no_slow_process_stops_commits_for_longer_than_promised",
    "test_nothing_grows_with_the_number_of_steps",
    "test_of_two_parts_that_each_have_a_host_of_the_job_one_ends_when_they_meet",
    "test_pods_that_are_killed_restarted_and_replaced_go_on_from_memory",
    "test_spares_that_are_cut_off_together_with_a_store_wait_and_come_back",
    "test_the_end_of_rank_0_alone_is_not_the_end_of_the_job",
    "test_the_interval_follows_the_network",
    "test_the_operator_drains_a_node",
    "test_whatever_data_consist_of_in_workers",
    "test_whole_jobs_are_told_at_random_moments",
}


def _is_soak(node: ast.AST) -> bool:
    return "pytest.mark.soak" in ast.unparse(node).replace("marks=pytest.mark.soak", "").replace("marks=[pytest.mark.soak", "")


def test_what_was_found_and_what_is_promised_is_tested_in_the_suite_but_for_these() -> None:
    """By the marks of functions, classes and modules; where some cases of a test are long, the others are in the suite."""
    tiers: dict[str, set[bool]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        body = ast.parse(file.read_text()).body
        whole = any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _is_soak(node.value) for node in body)
        found: list[tuple[ast.stmt, bool]] = [(node, whole) for node in body]
        for node, soak in found:
            if isinstance(node, ast.ClassDef):
                found += [(each, soak or any(map(_is_soak, node.decorator_list))) for each in node.body]
            elif isinstance(node, ast.FunctionDef):
                tiers.setdefault(node.name, set()).add(soak or any(map(_is_soak, node.decorator_list)))
    fixed = "".join(re.findall(r"(?ms)^### Fixed\n(.*?)(?=^##|\Z)", (ROOT / "CHANGELOG.md").read_text()))
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("problems", "track_record", "failure_model", "security"))
    named = set(re.findall(r"\b(test_[a-z0-9_]+)`", fixed + pages))
    assert len(named) > 400
    assert {name for name in named if tiers.get(name) == {True}} == LONG


@pages
def test_tests_that_are_named_exist(page: Path) -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    assert [name for name in re.findall(_TESTS, page.read_text()) if f"def {name}(" not in tests] == []


def test_survival_table_of_the_failure_model() -> None:
    """GEMINI, Corollary 1, gives bounds; the page has the exact values."""
    rows = re.findall(r"^\| (\d) \| ([\d.]+) % \| ([\d.]+) % \|$", (ROOT / "docs" / "failure_model.md").read_text(), re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    for lost, *cells in rows:
        for copies, cell in zip((2, 4), cells, strict=True):
            assert float(cell) == round(100 * float(survival_probability(part_sizes(16, copies), copies, int(lost))), 1)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").iterdir()), ids=lambda file: file.name)
def test_configs_are_accepted(file: Path) -> None:
    assert load_config(environ={"GEMINI_CONFIG": str(file)}) != GeminiConfig()


def test_decisions_are_numbered_pages_of_one_form() -> None:
    """Each says its context, what follows and what was given up, is in the index, and is named where the design relies on it."""
    assert [page.name[:4] for page in DECISIONS] == [f"{number:03}-" for number in range(1, len(DECISIONS) + 1)]
    index, design = (DECISIONS[0].parent / "README.md").read_text(), (ROOT / "docs" / "design.md").read_text()
    for page in DECISIONS:
        title, *headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        number, _, said = title.partition(". ")
        assert headings == ["Context", "Decision", "Consequences", "What was given up, and why"], page.name
        assert f"| [{number}]({page.name}) | {said} |" in index
        assert f"[{number}](decisions/{page.name})" in design


def test_the_index_of_reports_is_the_folder() -> None:
    """Every report is in it, with the command that is in the report."""
    folder = ROOT / "benchmarks" / "results"
    rows = re.findall(r"^\| (\[.*) \| .* \| `([^`]*)` \|$", (folder / "README.md").read_text(), re.MULTILINE)
    listed = [(report, command) for cell, command in rows for report in re.findall(r"\]\(([^)]+)\)", cell)]
    assert sorted(report for report, _ in listed) == [path.name for path in REPORTS]
    for report, command in listed:
        assert command.partition(" ...")[0] in (folder / report).read_text(), report


def test_short_pages_stay_short() -> None:
    """A visitor reads README.md and docs/design.md as a whole."""
    for page, most in (("README.md", 130), ("docs/design.md", 250)):
        assert len((ROOT / page).read_text().splitlines()) <= most, f"{page}: move what is detail to a page of its own in docs"


@pytest.mark.parametrize(
    "page", [*(ROOT / "docs" / name for name in ("walkthrough.md", "pipelines.md")), ROOT / "CONTRIBUTING.md", *DECISIONS], ids=_name
)
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text()))
    assert named or page in DECISIONS
    assert [name for name in sorted(named) if not any((ROOT / base / name).is_file() for base in ("", "gemini_ft"))] == []


def test_the_papers_are_where_the_page_says() -> None:
    """Each row of docs/papers.md names code and a test that are there, or says that there is none."""
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / "papers.md").read_text(), re.MULTILINE)
    found = [row.split(" | ") for row in rows if not row.startswith("from the paper")]
    assert len(found) > 40
    for claim, code, test, _ in found:
        if code == "*not here*":
            assert test == "-", claim
            continue
        assert (ROOT / code.strip("`")).is_file(), claim
        file, _, name = test.strip("`").partition("::")
        assert re.search(rf"^\s*def {name}\(", (ROOT / file).read_text(), re.MULTILINE), claim


def test_a_word_is_explained_once_and_found_by_the_alphabet() -> None:
    words = re.findall(r"^\| ([a-z ]+) \|.*\|.*\|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert len(words) > 40
    assert words == sorted(set(words))


def test_problems_name_tests_that_exist() -> None:
    rows = re.findall(r"^\| .* \| (\[.*) \| .* \| `([^`]*)` \|$", (ROOT / "docs" / "problems.md").read_text(), re.MULTILINE)
    assert len(rows) >= 15
    for threads, test in rows:
        file, _, name = test.partition("::")
        assert re.search(rf"^\s*def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (threads, test)


def _sources() -> dict[str, str]:
    """Text of every class, function and method at the top of a module; of those with one name, all."""
    found: dict[str, str] = {}
    for file in (file for folder in ("gemini_ft", "sync", "compression") for file in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            parts = node.body if isinstance(node, ast.ClassDef) else []
            for prefix, each in [("", node), *((f"{node.name}.", part) for part in parts if isinstance(node, ast.ClassDef))]:
                if isinstance(each, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    name = f"{prefix}{each.name}"
                    found[name] = "\n".join([found.get(name, ""), *lines[each.lineno - 1 : each.end_lineno]])
    return found


@pytest.mark.parametrize("page", ["walkthrough.md", "pipelines.md"])
def test_each_name_of_a_walk_calls_the_next(page: str) -> None:
    text, sources = (ROOT / "docs" / page).read_text(), _sources()
    chains = [line.split(" -> ") for line in re.findall(r"^(?:[a-z' ]+  )?(\w\S* -> .*)$", text, re.MULTILINE)]
    assert chains
    assert [name for chain in chains for name in chain if name not in sources] == []
    for chain in chains:
        for caller, callee in pairwise(chain):
            called = callee.removesuffix(".__init__").rpartition(".")[2]
            assert re.search(rf"\b{called}\b", sources[caller]), f"{caller} -> {callee}"
    if page == "walkthrough.md":
        assert [name for name in set(re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", text)) if name not in sources] == []
