"""The files in `examples/policies` work on the net that they are written for."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel import SwapManager, apply_policy, load_policy

FOLDER = Path(__file__).parents[2] / "examples" / "policies"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_examples() -> None:
    assert {"mixed.yaml", "recompute_all_blocks.yaml", "recompute_swapped_inputs.yaml", "swap_all_blocks.yaml"} <= {
        path.name for path in FILES
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_decides_about_every_block(gpt: nn.Cell, path: Path) -> None:
    plan = apply_policy(gpt, path)
    assert {f"layers.{index}" for index in range(4)} <= {row.path for row in plan.rows}
    plan.remove()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_fits_a_net_of_any_depth(new_gpt: type[nn.Cell], path: Path) -> None:
    assert load_policy(path).resolve(new_gpt(1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_has_no_rule_without_effect(gpt: nn.Cell, path: Path) -> None:
    assert "has no effect" not in load_policy(path).describe(gpt)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_begins_with_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_gives_the_gradients_of_the_plain_net(gpt: nn.Cell, swap_manager: SwapManager, path: Path) -> None:
    swap_manager.configure(min_bytes=1)
    x = Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    step = ms.value_and_grad(gpt, None, gpt.trainable_params())
    plain_loss, plain = step(x)
    plan = apply_policy(gpt, path)
    loss, grads = step(x)
    assert loss.asnumpy() == plain_loss.asnumpy()
    for grad, expected in zip(grads, plain, strict=True):
        np.testing.assert_array_equal(grad.asnumpy(), expected.asnumpy())
    assert SwapManager().stats().live_bytes == 0
    plan.remove()
