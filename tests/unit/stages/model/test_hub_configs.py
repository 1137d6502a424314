"""Published configs of the Hub are computed, or refused by name: the table of docs/hub.md."""

import os
import re
from pathlib import Path
from typing import Final

import pytest

from headway.stages.model.families import FAMILIES, NOT_COMPUTED
from headway.stages.model.hugging_face import model_spec
from tests.rigs.hub_configs import CONFIGS, Config

PAGE: Final = Path(__file__).resolve().parents[4] / "docs/hub.md"
BEGIN, END = "<!-- configs -->\n", "<!-- end of configs -->"
REFUSED: Final = 150
"""Most characters of a reason in the table."""


def answer_to(config: Config) -> str:
    """`computed`, or why not."""
    try:
        model_spec(config)
    except ValueError as error:
        reason = str(error)
        return f"refused: {reason if len(reason) <= REFUSED else reason[:REFUSED] + '…'}"
    return "computed"


def table() -> str:
    """The rows of the page."""
    rows = [f"| {name} | {config['model_type']} | {answer_to(config)} |\n" for name, config in CONFIGS.items()]
    return "| model | `model_type` | answer |\n|---|---|---|\n" + "".join(rows)


def test_the_page_has_the_answer_to_each_published_config() -> None:
    """`HEADWAY_WRITE_DOCS=1` writes the table anew."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}{table()}{END}{after}"
    if os.environ.get("HEADWAY_WRITE_DOCS"):
        PAGE.write_text(wanted)
    assert text == wanted


@pytest.mark.parametrize("model_type", NOT_COMPUTED)
def test_a_family_that_is_not_computed_is_refused_with_what_it_lacks_and_the_nearest_that_works(
    model_type: str,
) -> None:
    """One line, which names a family of the table."""
    missing, nearest = NOT_COMPUTED[model_type]
    assert nearest in FAMILIES
    assert model_type not in FAMILIES
    with pytest.raises(
        ValueError, match=f"'{model_type}': .* not computed; the nearest family that works is {nearest}"
    ):
        model_spec({"model_type": model_type})
    assert len(missing) < 80


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_opens_is_what_is_computed(name: str) -> None:
    """A computed config has the parameters that transformers gives it, by number."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    if answer_to(CONFIGS[name]) != "computed":
        pytest.skip("refused")
    from headway.stages.model.decoder import parameter_shapes
    from headway.stages.spec import layer_names

    spec = model_spec(CONFIGS[name])
    own = [s.numel() for layer in layer_names(spec) for s in parameter_shapes(layer, spec).values()]
    ours = sum(own) - spec.tie_word_embeddings * spec.vocab_size * spec.hidden_size
    given = dict(CONFIGS[name].get("text_config", CONFIGS[name]))
    given.pop("auto_map", None)
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    kept = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    assert ours == sum(tensor.numel() for tensor in (*model.parameters(), *kept))


def test_the_models_of_the_readme_are_computed() -> None:
    """Those of its fine-tuning; an Instruct has the config of its base model, but for ids of tokens."""
    line = re.search(
        r"^model=(\S+) length=.* (\S+/\S+) length=", (PAGE.parents[1] / "README.md").read_text(), re.MULTILINE
    )
    assert line is not None
    assert {answer_to(CONFIGS[name.removesuffix("-Instruct")]) for name in line.groups()} == {"computed"}
