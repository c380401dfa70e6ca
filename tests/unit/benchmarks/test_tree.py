"""`make bench-tree`: what is counted and what is compared, on groups of a few hundred tokens."""

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.client import BenchmarkError
from benchmarks.tree import benchmark as tree
from benchmarks.tree import model as tree_model
from benchmarks.tree import report as tree_report
from benchmarks.tree.benchmark import command
from benchmarks.tree.flops import Flops, ModelSizes, count_flops
from benchmarks.tree.groups import (
    BUILDERS,
    BenchGroup,
    TrainedCall,
    TreeOutline,
    make_compaction_group,
    make_group,
    make_outline,
    make_subagent_group,
    make_synthetic_group,
    read_outline,
)
from benchmarks.tree.report import BuilderCost, TimedStep, TreePlan, TreeReport, draw_svg
from polar.errors import ConfigError
from polar.records.trajectory import SessionPaths
from polar.records.trajectory import TokenPath as TokenPath
from polar.train.packing import pack_trees
from polar.trajectory.tree import build_token_tree

SIZES = ModelSizes(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=4, vocabulary=32)
FIXTURES = Path(__file__).parent.parent.parent / "fixtures" / "trees"


def small(turns: int = 4) -> BenchGroup:
    return make_synthetic_group("small", sessions=3, system=50, turns=turns, sampled=5, observed=15)


def path(session: str, seq: int, prompt: list[int], sampled: list[int]) -> TokenPath:
    return TokenPath(
        session_id=session,
        exchange_id=f"{session}{seq}",
        seq=seq,
        prompt=np.array(prompt, np.int32),
        sampled=np.array(sampled, np.int32),
        logprobs=None,
        versions=None,
        num_trainable=len(sampled),
    )


def stripped() -> BenchGroup:
    """Two sessions whose second prompt lacks a token of what was sampled first."""
    first = [path("a", 0, [1, 2, 3], [4, 5, 6]), path("a", 1, [1, 2, 3, 5, 6, 7], [8, 9])]
    second = [path("b", 0, [1, 2, 3], [4, 4]), path("b", 1, [1, 2, 3, 4, 7], [8])]
    return BenchGroup("stripped", "", [SessionPaths("a", first), SessionPaths("b", second)])


# Groups


def test_a_synthetic_group_shares_its_system_prompt_and_nothing_else() -> None:
    group = small()
    tokens = {name: build(group).tokens for name, build in BUILDERS.items()}
    assert tokens == {
        "prefix_tree": 50 + 3 * 80,
        "prefix_merging": 3 * 130,
        "per_request": 3 * (70 + 90 + 110 + 130),
    }


def test_sub_agents_and_windows_share_system_prompts_and_nothing_else() -> None:
    helped = make_subagent_group("helped", sessions=2, system=100, turns=3, errands=2, errand_turns=1)
    assert BUILDERS["prefix_tree"](helped).tokens == 100 + 2 * 3 * 500 + 50 + 2 * 2 * 500
    compacted = make_compaction_group("compacted", sessions=2, system=100, turns=2, windows=2)
    tree = BUILDERS["prefix_tree"](compacted)
    assert tree.tokens == 100 + 2 * (1000 + 150 + 1000)  # each summary stands in two windows
    assert len(tree.numbers[0]) == 2 * 4 * 150


def test_large_groups_are_there_for_who_names_them() -> None:
    assert not [it.name for it in tree.make_groups(None) if not it.name.startswith("synthetic")]
    assert [it.name for it in tree.make_groups(None, ["sub-agents", "long"])] == ["sub-agents, n = 8", "long, n = 2"]


def test_an_outline_has_the_group_s_tree_without_its_tokens() -> None:
    group = stripped()
    again = make_group(
        msgspec.json.decode(msgspec.json.encode(make_outline("x", "y", group.sessions)), type=TreeOutline)
    )
    for ours, theirs in zip(group.sessions, again.sessions, strict=True):
        assert [(len(it.prompt), len(it.sampled)) for it in ours.paths] == [
            (len(it.prompt), len(it.sampled)) for it in theirs.paths
        ]
    shapes = []
    for one in (group, again):
        made = build_token_tree([it for session in one.sessions for it in session.paths])
        shapes.append(([(node.parent, node.start, node.stop) for node in made.nodes], made.ends))
    assert shapes[0] == shapes[1]


def test_an_outline_leaves_out_what_trains_nothing() -> None:
    idle = msgspec.structs.replace(path("a", 0, [7, 7], [7]), num_trainable=0)
    half = msgspec.structs.replace(path("a", 1, [1, 2], [3, 4, 5]), num_trainable=1)
    drawn = make_outline("x", "", [SessionPaths("a", [half, idle])])
    assert drawn.lengths == [3]
    assert drawn.walks == [TrainedCall(0, 0, 2, 1)]


def test_builders_give_each_sampled_token_the_same_weight() -> None:
    for group in (small(), stripped()):
        found = []
        for build in BUILDERS.values():
            batch = build(group)
            numbers, weights = np.concatenate(batch.numbers), np.concatenate(batch.weights)
            order = np.argsort(numbers)
            assert numbers[order].tolist() == list(range(len(order)))
            found.append(weights[order])
        for weights in found[1:]:
            np.testing.assert_allclose(weights, found[0], rtol=1e-6)


def test_a_file_that_is_no_group_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": 1}')
    with pytest.raises(BenchmarkError, match=r"x\.json is no recorded group"):
        read_outline(tmp_path / "x.json")


def test_groups_are_chosen_by_how_their_names_begin() -> None:
    assert [group.name for group in tree.make_groups(None, ["synthetic, n = 1"], quick=True)] == ["synthetic, n = 16"]
    with pytest.raises(BenchmarkError, match=r"No group is called nothing\. There are: synthetic, n = 8, synth"):
        tree.make_groups(None, ["nothing"], quick=True)


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.json")), ids=lambda file: file.stem)
def test_recorded_groups_share_what_they_should(file: Path) -> None:
    """Sixteen sessions of one task, and the tree has their common prompt once."""
    group = make_group(read_outline(file))
    assert len(group.sessions) == 16
    tokens = {name: build(group).tokens for name, build in BUILDERS.items()}
    assert tokens["prefix_tree"] < tokens["prefix_merging"] <= tokens["per_request"]
    if file.stem.startswith(tree_report.STRIPPED):
        assert tokens["prefix_merging"] > 10 * tokens["prefix_tree"]


# FLOPs


def test_flops_of_one_path_are_those_that_one_counts_by_hand() -> None:
    group = make_synthetic_group("one", sessions=1, system=3, turns=1, sampled=2, observed=5)
    found = count_flops(SIZES, pack_trees(BUILDERS["prefix_merging"](group).trees))
    matrices = 2 * (8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16)  # q, k and v, o, feed-forward
    assert found.matrices == 6 * matrices * 10
    assert found.output == 6 * 8 * 32 * 2
    assert found.attention == 3 * 4 * 2 * 4 * 4 * sum(range(1, 11))


def test_attention_of_a_tree_is_that_of_its_paths_with_what_they_share_once() -> None:
    group = small()
    tree_flops = count_flops(SIZES, pack_trees(BUILDERS["prefix_tree"](group).trees))
    merged = count_flops(SIZES, pack_trees(BUILDERS["prefix_merging"](group).trees))
    shared = count_flops(
        SIZES,
        pack_trees(
            BUILDERS["prefix_merging"](
                make_synthetic_group("s", sessions=1, system=0, turns=1, sampled=5, observed=45)
            ).trees
        ),
    )
    assert merged.attention - tree_flops.attention == 2 * shared.attention
    assert merged.output == tree_flops.output


def test_an_output_that_two_samplings_share_is_counted_once() -> None:
    made = pack_trees(BUILDERS["prefix_tree"](stripped()).trees)
    alone = pack_trees(BUILDERS["per_request"](stripped()).trees)
    assert count_flops(SIZES, made).output == 6 * 8 * 32 * 6
    assert count_flops(SIZES, alone).output == 6 * 8 * 32 * 8


# A run


def test_a_sample_has_sequences_of_all_lengths() -> None:
    each = [float(it) for it in range(1, 101)]
    chosen = tree.choose_spread(each, 0.1 * sum(each))
    assert 9 <= len(chosen) <= 10
    assert min(chosen) < 10
    assert max(chosen) > 90
    assert tree.choose_spread(each, 0.5) == [50]


def test_a_whole_run_on_the_cpu() -> None:
    kept: list[int] = []
    plan = TreePlan(shape="tiny", device="cpu", chunk_tokens=64, limit=0.0, sample=1e-9)
    report = tree.run(plan, [small()], lambda *_: None, lambda it: kept.append(len(it.cells)))
    assert kept == [0, 1, 2, 3, 3]  # the gradients come first
    assert [cell.counted.builder for cell in report.cells] == ["prefix_tree", "prefix_merging", "per_request"]
    assert max(report.gradients.values()) < tree_report.EXACT
    whole, *sampled = report.cells
    assert whole.share == 1  # the first has nothing to be judged by
    for cell in sampled:
        assert 0 < cell.share < 1
        assert cell.difference is not None
        assert cell.difference < 1e-5
    assert list(report.absent) == ["small, TRL"]


def test_no_cell_is_begun_without_time_for_it() -> None:
    plan = TreePlan(shape="tiny", device="cpu", builders=("prefix_tree", "prefix_merging"), seconds=0.0)
    report = tree.run(plan, [small(turns=2)], lambda *_: None, lambda _: None)
    assert [cell.counted.builder for cell in report.cells] == ["prefix_tree"]
    assert "there was no time left" in report.absent["small, prefix_merging"]


def test_an_unknown_shape_is_told() -> None:
    with pytest.raises(BenchmarkError, match="gpt-9 is none of tiny, qwen3-4b, and no model's folder"):
        tree_model.load_config("gpt-9")


# What is promised


def cell(group: str, builder: str, seconds: float, total: float, *, share: float = 1.0) -> TimedStep:
    counted = BuilderCost(group, builder, 1, 100, 1000, 1000, 10, Flops(total, 0.0, 0.0))
    return TimedStep(counted, [seconds * share], share, 10**9, None)


def test_what_a_sample_takes_as_all_of_it_does_is_not_scaled() -> None:
    sampled = cell("any", "per_request", 10, 1e15, share=0.1)
    sampled.optimizer = 0.5
    assert sampled.seconds == pytest.approx((1.0 - 0.5) / 0.1 + 0.5)


def report(cells: list[TimedStep]) -> TreeReport:
    return TreeReport(
        TreePlan(), "NVIDIA H200", "bfloat16", {"torch": "2"}, 790e12, 989e12, gradients={"x": 1e-6}, cells=cells
    )


def reached(found: TreeReport) -> dict[str, bool]:
    return {promise.what: promise.reached for promise in tree_report.list_promises(found)}


def test_times_are_judged_by_flops() -> None:
    group = "synthetic, n = 8"
    good = report(
        [
            cell(group, "prefix_tree", 20, 7e15),
            cell(group, "prefix_merging", 27, 9.8e15),
            cell(group, "per_request", 501, 19e16),
        ]
    )
    assert all(reached(good).values())
    slow = report(
        [
            cell(group, "prefix_tree", 25, 7e15),
            cell(group, "prefix_merging", 27, 9.8e15),
            cell(group, "per_request", 501, 19e16),
        ]
    )
    assert [what for what, fine in reached(slow).items() if not fine] == [
        f"{group}: over prefix_merging",
        f"{group}: over per_request",
        f"{group}: FLOPs a second over the trial's",
    ]


def test_stripped_groups_promise_ten_times() -> None:
    cells = [
        cell("think-stripped, n = 8", "prefix_tree", 10, 1e15),
        cell("think-stripped, n = 8", "prefix_merging", 99, 9e15),
    ]
    assert reached(report(cells))["think-stripped, n = 8: over prefix_merging"] is False


def test_a_sampled_cell_is_scaled_and_says_so() -> None:
    found = report(
        [cell("pi, n = 8", "prefix_tree", 10, 1e15), cell("pi, n = 8", "per_request", 200, 20e15, share=0.1)]
    )
    found.cells[0].reserved, found.cells[0].retries = 123_400_000_000, 7
    console = Console(file=io.StringIO(), width=200)
    tree_report.print_report(found, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "200.00" in shown
    assert "123.4 │       7" in shown
    assert "10.0%" in shown
    assert "scaled: 10.0% was timed" in draw_svg(found)
    written = tree_report.to_json(found)
    document = msgspec.json.decode(written)
    assert document["cells"][1]["seconds"] == 200
    assert document["cells"][1]["flops_per_second"] == 1e14


def test_reports_that_were_kept_are_shown_as_one(tmp_path: Path) -> None:
    first, second = report([cell("a", "prefix_tree", 10, 1e15)]), report([cell("b", "prefix_tree", 20, 1e15)])
    second.gradients = {"x": 2e-5}
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file, one in zip(files, (first, second), strict=True):
        file.write_bytes(tree_report.to_json(one))
    both = tree_report.read_reports(files)
    assert [it.counted.group for it in both.cells] == ["a", "b"]
    assert reached(both)["gradients in fp32, the largest difference"] is False
    (tmp_path / "3.json").write_text("{}")
    with pytest.raises(BenchmarkError, match="no report"):
        tree_report.read_reports([tmp_path / "3.json"])


def test_the_command_counts_without_computing() -> None:
    told = CliRunner().invoke(command, ["--quick", "--shape", "tiny", "--count", "1"], catch_exceptions=False)
    assert told.exit_code == 0
    assert "13,200" in told.output  # tokens of a tenth of the first group
    assert "474,000" in told.output


def test_the_command_knows_its_builders() -> None:
    with pytest.raises(ConfigError, match="There is no builder nobody, but prefix_tree, prefix_merging, per_request"):
        CliRunner().invoke(command, ["--quick", "--builder", "nobody"], catch_exceptions=False)
