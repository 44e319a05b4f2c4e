"""The demo's net."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from pydantic import ValidationError

from hyper_parallel.demo.model import build_model
from hyper_parallel.demo.settings import DemoSettings, describe_errors

SMALL = DemoSettings(layers=2, dim=32, batch=2, seq=8)


def test_the_same_settings_give_the_same_weights():
    first, second = (build_model(SMALL)[0] for _ in range(2))
    for one, other in zip(first.get_parameters(), second.get_parameters(), strict=True):
        assert one.name == other.name
        assert np.array_equal(one.asnumpy(), other.asnumpy())


def test_another_seed_gives_other_weights_and_biases():
    nets = [build_model(SMALL.model_copy(update={"seed": seed}))[0] for seed in (0, 1)]
    weights = [dict(net.parameters_and_names()) for net in nets]
    for name in ("head.weight", "head.bias", "layers.1.attention.qkv.bias"):
        assert not np.array_equal(weights[0][name].asnumpy(), weights[1][name].asnumpy())


def test_blocks_have_the_names_that_policy_files_use():
    names = [name for name, _ in build_model(SMALL)[0].cells_and_names()]
    for part in ("norm1", "attention", "norm2", "mlp"):
        assert f"layers.1.{part}" in names


def test_a_position_does_not_see_what_follows_it():
    net, (tokens, _) = build_model(SMALL)
    changed = tokens.asnumpy().copy()
    changed[:, -1] = 5
    mix = net.layers[0].attention
    outputs = [mix(net.token(Tensor(indices))).asnumpy() for indices in (tokens.asnumpy(), changed)]
    assert np.array_equal(outputs[0][:, :-1], outputs[1][:, :-1])
    assert not np.array_equal(outputs[0][:, -1], outputs[1][:, -1])


def test_every_parameter_gets_a_gradient():
    net, _ = build_model(SMALL)
    tokens = Tensor(np.random.RandomState(0).randint(0, 96, (2, 8)).astype(np.int32))
    _, gradients = ms.value_and_grad(net, None, net.trainable_params())(tokens, tokens)
    for parameter, gradient in zip(net.trainable_params(), gradients, strict=True):
        assert np.abs(gradient.asnumpy()).max() > 0, parameter.name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers: .* got 0"),
        ({"dim": 30}, r"dim must be a multiple of the number of heads \(4\), but got 30"),
        ({"steps": -1, "seq": 0}, "seq: .* got 0; steps: .* got -1"),
        ({"learning_rate": 0}, "learning_rate: .* got 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(values, message):
    with pytest.raises(ValidationError) as caught:
        DemoSettings(**values)
    assert pytest.raises(ValueError, match=message).matches(ValueError(describe_errors(caught.value)))
