"""Which engines may serve a run: those with its model, as far as they tell."""

import pytest

from polar.config import EngineSettings
from polar.engines.run_model import ModelMismatchError, RunModel
from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.tokenizer import load_tokenizer
from tests.unit.engines.fakes import FakeEngine

TOKENIZER = load_tokenizer(TOKENIZER_FOLDER)
SETTINGS = EngineSettings(kind="vllm", tokenizer=str(TOKENIZER_FOLDER))


class TellingEngine(FakeEngine):
    """Says what it serves, and the ids of texts: with its control tokens moved on, or spelled out as text."""

    def __init__(self, model: str = "m", *, shift: int = 0, spells: bool = False, silent: bool = False) -> None:
        super().__init__()
        self.capabilities.models = [model]
        self.capabilities.accepts_token_ids = True
        self.asked = 0
        self._shift = shift
        self._spells = spells
        self._silent = silent

    def find_tokenizer_folder(self) -> str | None:
        return str(TOKENIZER_FOLDER)

    async def tokenize(self, text: str) -> list[int] | None:
        self.asked += 1
        if self._silent:
            return None
        if self._spells:
            text = text.replace("<", "< ")
        controls = set(TOKENIZER.added_tokens.values())
        return [id + self._shift if id in controls else id for id in TOKENIZER.encode(text)]


@pytest.mark.parametrize("engine", [TellingEngine(), TellingEngine(spells=True), TellingEngine(silent=True)])
async def test_what_an_engine_can_not_tell_is_not_held_against_it(engine: TellingEngine) -> None:
    model = RunModel("mine", SETTINGS)
    assert model.tokenizer_folder is None
    await model.check(engine)
    assert model.tokenizer_folder == str(TOKENIZER_FOLDER)


async def test_control_tokens_with_other_ids_are_another_vocabulary() -> None:
    model = RunModel("mine", SETTINGS)
    with pytest.raises(ModelMismatchError, match=rf"http://engine serves m .* than {TOKENIZER_FOLDER}.* the run mine"):
        await model.check(TellingEngine(shift=1))
    assert model.tokenizer_folder is None


async def test_an_engine_without_the_named_model_is_refused_before_its_vocabulary_is_asked() -> None:
    engine = TellingEngine("other")
    with pytest.raises(ModelMismatchError, match="serves other, and the run mine has the model org/m"):
        await RunModel("mine", SETTINGS, name="org/m").check(engine)
    assert engine.asked == 0
    await RunModel("mine", SETTINGS, name="org/m").check(TellingEngine("m"))


async def test_an_engine_that_renders_prompts_itself_may_have_any_vocabulary() -> None:
    engine = TellingEngine(shift=1)
    await RunModel("mine", SETTINGS.model_copy(update={"render": "engine"})).check(engine)
    engine.capabilities.accepts_token_ids = False
    await RunModel("mine", SETTINGS).check(engine)


async def test_a_run_without_a_model_of_its_own_has_the_default_runs() -> None:
    default = RunModel("default", SETTINGS)
    mine = RunModel("mine", SETTINGS, default=default)
    await default.check(TellingEngine())
    assert mine.tokenizer_folder == str(TOKENIZER_FOLDER)
