"""What is sampled, with which probability, and from which weights: against plain forward passes."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from polar.engines.api_server.backend import SamplingOptions
from polar.engines.embedded.generation import Generation
from polar.engines.embedded.weights import WeightUpdate
from polar.errors import ConfigError
from tests.unit.engines.embedded import tiny

PROMPTS = [[5, 17, 300, 42], list(range(10, 90)), [7], [5, 17, 300, 42, 43, 44]]
CLOSE = 1e-4


async def sampled(generation: Generation, count: int) -> None:
    """Until a generation has so many tokens."""
    async for _ in generation.sample_steps():
        if len(generation.tokens) >= count:
            return
    raise AssertionError(f"it ended with {generation.finish_reason} after {len(generation.tokens)} tokens")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
async def test_logprobs_are_those_of_a_forward_pass_at_the_temperature(folder: Path, temperature: float) -> None:
    teacher = tiny.Teacher(folder)
    async with tiny.open_core(folder) as core:
        all_of_them = await asyncio.gather(
            *(tiny.generate_all(core, prompt, 12, temperature=temperature) for prompt in PROMPTS)
        )
    for generation in all_of_them:
        assert teacher.find_worst_difference(generation, temperature) < CLOSE
        assert (
            teacher.find_worst_difference(generation, temperature + 0.5) > 0.05
        )  # it is the temperature that was asked for


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"head_dim": 16}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),  # one layer of each
    ],
)
async def test_models_of_other_kinds(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    folder = tiny.make_model_folder(tmp_path / kind, kind, **changes)
    async with tiny.open_core(folder, max_batch_tokens=20) as core:
        all_of_them = await asyncio.gather(*(tiny.generate_all(core, prompt, 12) for prompt in PROMPTS))
    teacher = tiny.Teacher(folder)
    assert max(teacher.find_worst_difference(generation) for generation in all_of_them) < CLOSE


async def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    folder = tiny.make_model_folder(tmp_path / "strange", "qwen2", layer_types=["full_attention", "sliding_attention"])
    config = folder / "config.json"
    config.write_text(config.read_text().replace("sliding_attention", "linear_attention"))
    with pytest.raises(ConfigError, match="linear_attention"):
        async with tiny.open_core(folder):
            pass


async def test_more_requests_than_there_is_room_for(folder: Path) -> None:
    """Prompts are computed in pieces, and slots are used again, with whatever they held before."""
    teacher = tiny.Teacher(folder)
    prompts = [PROMPTS[1][:cut] + [cut] * (cut % 7) for cut in range(5, 80, 5)]
    async with tiny.open_core(folder, max_requests=3, max_batch_tokens=16) as core:
        all_of_them = await asyncio.gather(*(tiny.generate_all(core, prompt, 10) for prompt in prompts))
    assert max(teacher.find_worst_difference(generation) for generation in all_of_them) < CLOSE


async def test_what_is_known_is_not_computed_again(folder: Path, tmp_path: Path) -> None:
    teacher = tiny.Teacher(folder)
    async with tiny.open_core(folder) as core:
        first = await tiny.generate_all(core, PROMPTS[1], 8)
        computed = core.computed_tokens
        assert computed == len(PROMPTS[1]) + 7  # of the last token nobody asks for more
        turn = [*PROMPTS[1], *tiny.list_token_ids(first.tokens), 1, 2, 3]
        second = await tiny.generate_all(core, turn, 8)  # goes on from there
        assert core.computed_tokens - computed == 1 + 3 + 7
        computed = core.computed_tokens
        group = await asyncio.gather(
            *(tiny.generate_all(core, [9, *PROMPTS[1]], 4) for _ in range(4))
        )  # share a prompt
        assert core.computed_tokens - computed <= len(PROMPTS[1]) + 1 + 3 * 17 + 4 * 3
        update = tiny.save_perturbed_weights(folder, tmp_path / "weights", 1)
        await core.update_weights(WeightUpdate(str(update), 1))
        computed = core.computed_tokens
        third = await tiny.generate_all(core, turn, 8)  # but not under other weights
        assert core.computed_tokens - computed == len(turn) + 7
    for generation in [first, second, *group]:
        assert teacher.find_worst_difference(generation) < CLOSE
    assert tiny.Teacher(folder, {1: update}).find_worst_difference(third) < CLOSE


async def test_each_request_of_a_batch_is_sampled_its_own_way(folder: Path) -> None:
    teacher = tiny.Teacher(folder)
    async with tiny.open_core(folder) as core:
        greedy, again, hot, one = await asyncio.gather(
            tiny.generate_all(core, PROMPTS[0], 12, temperature=0.0),
            tiny.generate_all(core, PROMPTS[0], 12, temperature=0.0),
            tiny.generate_all(core, PROMPTS[0], 12, temperature=3.0),
            tiny.generate_all(core, PROMPTS[0], 12, temperature=3.0, top_k=1),
        )
    assert (
        tiny.list_token_ids(greedy.tokens)
        == tiny.list_token_ids(again.tokens)
        == tiny.list_token_ids(one.tokens)
        != tiny.list_token_ids(hot.tokens)
    )
    assert teacher.find_worst_difference(greedy) < CLOSE  # nothing is scaled at temperature 0
    assert all(token.logprob == 0 for token in one.tokens)  # there was nothing else to draw


async def test_a_seed_gives_the_same_again(folder: Path) -> None:
    async with tiny.open_core(folder) as core:
        one, two, other, unseeded = await asyncio.gather(
            *(tiny.generate_all(core, PROMPTS[1], 12, seed=seed) for seed in (1, 1, 2, None))
        )
    assert tiny.list_token_ids(one.tokens) == tiny.list_token_ids(two.tokens)
    assert tiny.list_token_ids(one.tokens) != tiny.list_token_ids(other.tokens)
    assert tiny.list_token_ids(one.tokens) != tiny.list_token_ids(unseeded.tokens)


async def test_alternatives_are_the_likeliest_tokens(folder: Path) -> None:
    async with tiny.open_core(folder) as core:
        generation = await tiny.generate_all(core, PROMPTS[0], 4, temperature=0.0, alternatives=3)
    for token in generation.tokens:
        assert len(token.alternatives) == 3
        assert token.alternatives[0] == (token.id, pytest.approx(token.logprob))
        assert token.alternatives[0][1] > token.alternatives[1][1]


async def test_ends_where_the_model_does(folder: Path, tmp_path: Path) -> None:
    async with tiny.open_core(folder) as core:
        plain = tiny.list_token_ids((await tiny.generate_all(core, PROMPTS[0], 8, temperature=0.0)).tokens)
    ending = shutil.copytree(folder, tmp_path / "ending")
    config = GenerationConfig(eos_token_id=[10**6, plain[3]])
    config.save_pretrained(ending)
    async with tiny.open_core(ending) as core:
        generation = await tiny.generate_all(core, PROMPTS[0], 8, temperature=0.0)
    at = plain.index(plain[3])
    assert tiny.list_token_ids(generation.tokens) == plain[: at + 1]
    assert (generation.finish_reason, generation.stop_reason) == ("stop", None)


async def test_ends_at_a_stop_id_a_stop_string_or_the_limit(folder: Path) -> None:
    async with tiny.open_core(folder) as core:
        plain = await tiny.generate_all(core, PROMPTS[0], 8, temperature=0.0)
        assert (len(plain.tokens), plain.finish_reason) == (8, "length")
        third = plain.tokens[2].id
        first = tiny.list_token_ids(plain.tokens).index(third)
        by_id = tiny.start_generation(core, PROMPTS[0], 8, SamplingOptions(temperature=0.0), stop_token_ids=[third])
        await sampled(by_id, first + 1)
        assert (by_id.finish_reason, by_id.stop_reason, len(by_id.tokens)) == ("stop", third, first + 1)
        text = core.tokenizer.decode(tiny.list_token_ids(plain.tokens))
        stop = text[3:6]
        by_text = tiny.start_generation(
            core, PROMPTS[0], 8, SamplingOptions(temperature=0.0), stop=[stop], wants_text=True
        )
        async for _ in by_text.sample_steps():
            pass
        assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
        assert "".join(token.text for token in by_text.tokens) == text[: text.index(stop)]


async def test_what_nobody_waits_for_makes_room(folder: Path) -> None:
    async with tiny.open_core(folder, max_requests=1) as core:
        with tiny.PassLimiter(core) as passes:
            passes.allow(2)
            endless = tiny.start_generation(core, PROMPTS[0], 400)
            await sampled(endless, 2)
            waiting = asyncio.create_task(tiny.generate_all(core, PROMPTS[1], 4))
            core.end_generation(endless)
            assert endless.finish_reason == "abort"
        assert len((await waiting).tokens) == 4
        assert core.running_count == 0


async def test_nothing_is_sampled_while_it_is_paused(folder: Path) -> None:
    async with tiny.open_core(folder) as core:
        with tiny.PassLimiter(core) as passes:
            passes.allow(200)
            generation = tiny.start_generation(core, PROMPTS[0], 400)
            await sampled(generation, 3)
            await core.pause()
        await asyncio.sleep(0)  # what was on its way has come
        had = len(generation.tokens)
        late = tiny.start_generation(core, PROMPTS[1], 4)
        await asyncio.sleep(0.2)
        assert (len(generation.tokens), len(late.tokens)) == (had, 0)
        await core.resume()
        await sampled(generation, had + 3)
        await sampled(late, 4)
        assert tiny.Teacher(folder).find_worst_difference(generation) < CLOSE
        core.end_generation(generation)


@pytest.mark.parametrize("paused", [False, True])
async def test_new_weights_in_mid_generation(folder: Path, tmp_path: Path, paused: bool) -> None:
    """Each token's probability is that of the weights that its version names, all keys and values included."""
    updates = {version: tiny.save_perturbed_weights(folder, tmp_path / f"{version}", version) for version in (3, 4)}
    teacher = tiny.Teacher(folder, updates)
    async with tiny.open_core(folder) as core:
        with tiny.PassLimiter(core) as passes:
            generations = [tiny.start_generation(core, prompt, 60) for prompt in PROMPTS]
            for version, path in updates.items():
                passes.allow(20)
                await asyncio.gather(*(sampled(generation, len(generation.tokens) + 5) for generation in generations))
                if paused:
                    await core.pause()
                await core.update_weights(WeightUpdate(str(path), version))
                if paused:
                    await core.resume()
        late = await tiny.generate_all(core, PROMPTS[0], 8)
        await asyncio.gather(*(sampled(generation, 60) for generation in generations))
    assert [span.version for span in late.spans] == [4]
    for generation in [*generations, late]:
        assert teacher.find_worst_difference(generation) < CLOSE
    for generation in generations:
        assert [span.version for span in generation.spans] == [0, 3, 4]
        assert [span.start for span in generation.spans][1:] == [span.stop for span in generation.spans][:-1]
        # It would not have passed with the labels of one version alone.
        ids = tiny.list_token_ids(generation.tokens)
        said = teacher.logprobs(generation.request.prompt, ids, 0)
        reported = tiny.list_logprobs(generation.tokens)
        assert max(abs(float(said[at]) - value) for at, value in enumerate(reported)) > 0.05


async def test_weights_that_do_not_fit_change_nothing(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    good = load_file(tiny.save_perturbed_weights(folder, tmp_path / "good", 1))
    name = next(iter(good))
    save_file({key: value for key, value in good.items() if key != name}, tmp_path / "short")
    save_file(good | {"other": good[name].clone()}, tmp_path / "long")
    save_file(good | {name: good[name][:1].clone()}, tmp_path / "small")
    (tmp_path / "broken").write_bytes(b"no weights")
    async with tiny.open_core(folder) as core:
        for path in ("short", "long", "small", "broken", "missing"):
            with pytest.raises(ConfigError):
                await core.update_weights(WeightUpdate(str(tmp_path / path), 1))
        generation = await tiny.generate_all(core, PROMPTS[0], 8)
    assert (core.version, tiny.Teacher(folder).find_worst_difference(generation) < CLOSE) == (0, True)


async def test_a_restart_begins_with_the_last_update(folder: Path, tmp_path: Path) -> None:
    path = tiny.save_perturbed_weights(folder, tmp_path / "weights", 1)
    state = str(tmp_path / "state.json")
    async with tiny.open_core(folder, state=state) as core:
        await core.update_weights(WeightUpdate(str(path), 9))
    async with tiny.open_core(folder, state=state) as core:
        await core.restore_weights()
        generation = await tiny.generate_all(core, PROMPTS[0], 8)
    assert [span.version for span in generation.spans] == [9]
    assert tiny.Teacher(folder, {9: path}).find_worst_difference(generation) < CLOSE
    path.unlink()
    async with tiny.open_core(folder, state=state) as core:
        await core.restore_weights()
        assert core.version == 0
