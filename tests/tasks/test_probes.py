"""An attention from outside: whether it heeds masks and documents."""

import warnings
from typing import Any

import helpers
import pytest
from attention.mechanisms import assert_rejects

from lra_jax import attention
from lra_jax.configs import get_preset
from lra_jax.tasks import get_task


def ignores_the_mask(query, key, value, mask=None):
    zeros = query[0, 0, :, 0] * 0
    return helpers.power_attention(query, key, value, None, log_power=zeros)


def takes_anything(query, key, value, **keywords):
    return ignores_the_mask(query, key, value)


@pytest.mark.parametrize("function", [ignores_the_mask, takes_anything])
def test_an_attention_that_ignores_its_mask_says_so(function, tmp_path) -> None:
    config = helpers.tiny(tmp_path, attention=function)
    with pytest.warns(UserWarning, match="takes a mask, but attends to padding"):
        get_task("listops").check_on_devices(config)


def ignores_documents(query, key, value, mask=None, is_causal=False, **keywords):
    return attention.linear_attention(query, key, value, mask, is_causal=is_causal)


def test_an_attention_that_sees_the_future_or_other_documents_is_refused() -> None:
    def check(task: str, function: Any, **data: Any) -> None:
        config = get_preset(task, attention=function).replace(data=data)
        get_task(task).check_on_devices(config)

    check("mqar", ignores_documents)
    assert_rejects(
        lambda: check("mqar", takes_anything), "--attention: ", "no later positions"
    )
    assert_rejects(
        lambda: check("listops", ignores_documents, packing=True),
        *("--attention: ", "no other documents"),
    )
    check("listops", attention.linear_attention, packing=True)


@pytest.mark.parametrize(
    "attention", ["helpers:values_only", "helpers:Scaled", "helpers:MARKED", "softmax"]
)
def test_an_attention_that_heeds_its_mask_does_not(attention, tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = helpers.tiny(tmp_path, attention=attention)
        get_task("listops").check_on_devices(config)
