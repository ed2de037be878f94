"""RoPE out of every form of a config, found as ``connect`` finds it, against ``transformers``' modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.cache.model_config import load_model_config
from lmcache_stream.errors import GeometryError
from lmcache_stream.rope import RopeConfig

from .configs import CONFIGS, MULTIMODAL
from .forms import FORMS
from .reference import Reference, config_object
from .refused_configs import REFUSED

LAST = 131072


def read(given: object, max_model_len: int | None = LAST + 1) -> RopeConfig:
    config = load_model_config(given, "any")
    assert config is not None
    return RopeConfig.from_model_config(config.raw, max_model_len=max_model_len)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*CONFIGS, *MULTIMODAL])
def test_every_form_says_the_same(name: str, form: str, tmp_path: Path) -> None:
    whole = CONFIGS.get(name) or MULTIMODAL[name]
    rope = read(FORMS[form](whole, tmp_path))
    text = whole.get("text_config", whole)
    wanted = Reference(text, torch.tensor([LAST])).inv_freq
    assert torch.equal(torch.tensor(rope.inv_freq, dtype=torch.float32), wanted)
    assert rope == read(text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["Phi-3-mini-128k", "Phi-4-mini"])
def test_every_form_has_both_factors_of_longrope(name: str, form: str, tmp_path: Path) -> None:
    given = FORMS[form](CONFIGS[name], tmp_path)
    for max_model_len in (4096, 4097):
        wanted = Reference(CONFIGS[name], torch.tensor([max_model_len - 1])).inv_freq
        found = torch.tensor(read(given, max_model_len).inv_freq, dtype=torch.float32)
        assert torch.equal(found, wanted)
    with pytest.raises(GeometryError, match="pass max_model_len="):
        read(given, None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("max_model_len", [None, LAST])
def test_refused_in_every_form(name: str, form: str, max_model_len: int | None, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    given = FORMS[form](config, tmp_path)
    with pytest.raises(GeometryError) as caught:
        read(given, max_model_len)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Gemma-3-1B", "Gemma-3-4B"])
def test_no_hint_leads_around_two_thetas(name: str) -> None:
    """Not even where no sequence is longer than the window, pairing and theta are given by hand."""
    config = REFUSED[name][0]
    text = {**config.get("text_config", config), "rope_theta": 1e6, "num_key_value_heads": 1}
    text.pop("rope_local_base_freq", None)
    with pytest.raises(GeometryError, match="a theta of their own"):
        RopeConfig.from_model_config(text, max_model_len=512, pairing="half")


def without_theta(form: str, config: Mapping[str, Any], folder: Path) -> Any:
    """Return the config in that form, as if the theta had never been written."""
    if form.endswith("4"):
        return FORMS[form]({key: value for key, value in config.items() if key != "rope_theta"}, folder)
    known = config_object(config)
    del known.rope_parameters["rope_theta"]
    if form == "object of 5":
        return known
    if form == "dict of 5":
        return known.to_dict()
    # Not save_pretrained, which would not write some of these.
    (folder / "config.json").write_text(known.to_json_string())
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B", "Phi-4-mini", "GLM-4-9B-0414"])
def test_a_missing_theta_is_an_error_in_every_form(name: str, form: str, tmp_path: Path) -> None:
    given = without_theta(form, CONFIGS[name], tmp_path)
    with pytest.raises(GeometryError, match="has no rope_theta, which is never guessed: add it"):
        read(given)


QWEN: dict[str, Any] = {**config_object(CONFIGS["Qwen3-8B"]).to_dict()}
PLAIN = QWEN["rope_parameters"]
OTHER = {**PLAIN, "rope_theta": 1e4}
FULL = {"full_attention": PLAIN}
BOTH = {**FULL, "sliding_attention": OTHER}


@pytest.mark.parametrize(
    ("parameters", "changes", "reason"),
    [
        (FULL, {}, None),
        (FULL, {"layer_types": None}, None),
        # The layers are listed, and none is of the other type.
        (BOTH, {}, None),
        ({**FULL, "sliding_attention": None}, {}, None),
        (BOTH, {"layer_types": None}, "of their own"),
        ({**FULL, "sliding_attention": None}, {"layer_types": None}, "of their own"),
        (BOTH, {"layer_types": ["full_attention", "sliding_attention"]}, "kinds than full attention"),
        ({"sliding_attention": PLAIN}, {}, "of their own"),
        # Which of the two the engine reads depends on the model's code.
        ({**FULL, **OTHER}, {}, "of their own"),
        ({**FULL, **PLAIN}, {}, "of their own"),
        (FULL, {"rope_theta": 1e4}, "rope_theta is given as 1000000 and as 10000.0"),
        ({"full_attention": {"rope_type": "default"}}, {}, "has no rope_theta, which is never guessed"),
        ({"full_attention": {**PLAIN, "mrope_section": [1, 2]}}, {}, "M-RoPE"),
        ({"full_attention": {**PLAIN, "rope_type": "dynamic"}}, {}, "dynamic NTK"),
        ({"full_attention": FULL}, {}, "unknown rope parameters full_attention"),
    ],
)
def test_parameters_by_layer_type(
    parameters: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    config = {**QWEN, "rope_parameters": parameters, **changes}
    if reason is None:
        assert RopeConfig.from_model_config(config) == RopeConfig.from_model_config(QWEN)
        return
    with pytest.raises(GeometryError, match=reason) as caught:
        RopeConfig.from_model_config(config)
    assert "\n" not in str(caught.value)
