"""What MindSpore's CPU back end lacks, against numpy; what is drawn at random; what is missing.

Prints, for each claim, how it fails; nothing if it holds.
"""

import json
import traceback

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.mint.nn import functional as F

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
random = np.random.RandomState(5)


def draw(*shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def same(got: Tensor, expected: np.ndarray, what: str) -> None:
    scale = np.abs(expected).max() + 1e-6
    np.testing.assert_allclose(got.asnumpy() / scale, expected / scale, rtol=0, atol=3e-6, err_msg=what)


def slope(function, x: np.ndarray, weight: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of sum(function(x) * weight), by differences in double precision."""
    result = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        moved = [x.astype(np.float64) for _ in range(2)]
        moved[0][place] += step
        moved[1][place] -= step
        result[place] = ((function(moved[0]) - function(moved[1])) * weight).sum() / (2 * step)
    return result


def check_with_gradient(what: str, ours, reference, x: np.ndarray) -> None:
    weight = draw(*reference(x).shape)
    same(ours(Tensor(x)), reference(x), what)
    gradient = ms.grad(lambda t: (ours(t) * Tensor(weight)).sum())(Tensor(x)).asnumpy()
    expected = slope(reference, x, weight)
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=2e-5, err_msg=f"gradient of {what}")


def adam_w() -> None:
    for amsgrad in (False, True):
        start = draw(4, 3)
        parameter = ms.Parameter(Tensor(start))
        optimizer = mint.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, amsgrad=amsgrad)
        x, m, v, top = start.astype(np.float64), 0.0, 0.0, 0.0
        for number in range(1, 4):
            gradient = draw(4, 3)
            optimizer((Tensor(gradient),))
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.astype(np.float64) ** 2
            top = np.maximum(top, v)
            spread = (top if amsgrad else v) / (1 - 0.999**number)
            x = x * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**number)) / (np.sqrt(spread) + 1e-8)
        same(parameter, x, f"AdamW, amsgrad={amsgrad}")


def rms(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma


def swiglu(x: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, -1)
    return first / (1 + np.exp(-first)) * second


def convolve(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = x.shape[2:]
    windows = [padded[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return np.einsum("kbchw,ock->bohw", np.stack(windows), weight.reshape(*weight.shape[:2], 9))


def pooled(x: np.ndarray, how) -> np.ndarray:
    batch, channels, height, width = x.shape
    return how(how(x.reshape(batch, channels, height // 2, 2, width // 2, 2), 5), 3)


def nets() -> None:
    gamma, weight = draw(6), draw(4, 2, 3, 3)
    check_with_gradient(
        "rms_norm", lambda t: ops.rms_norm(t, Tensor(gamma), 1e-6)[0], lambda x: rms(x, gamma), draw(3, 6)
    )
    check_with_gradient("swiglu", lambda t: ops.swiglu(t, -1), swiglu, draw(3, 6))
    image = draw(2, 2, 4, 4)
    check_with_gradient(
        "conv2d", lambda t: F.conv2d(t, Tensor(weight), padding=1), lambda x: convolve(x, weight), image
    )
    expected = slope(lambda w: convolve(image, w), weight, np.ones((2, 4, 4, 4)))
    got = ms.grad(lambda w: F.conv2d(Tensor(image), w, padding=1).sum())(Tensor(weight)).asnumpy()
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)
    check_with_gradient("max_pool", lambda t: F.max_pool2d(t, 2), lambda x: pooled(x, np.max), image)
    check_with_gradient("avg_pool", lambda t: F.avg_pool2d(t, 2), lambda x: pooled(x, np.mean), image)
    check_with_gradient(
        "adaptive", lambda t: F.adaptive_avg_pool2d(t, 1), lambda x: pooled(pooled(x, np.mean), np.mean), image
    )


def normalized(x: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def batch_norm() -> None:
    net, x = mint.nn.BatchNorm2d(2), draw(3, 2, 4, 4)
    net.set_train()
    check_with_gradient("batch norm", net, lambda x: normalized(x, (0, 2, 3)), x)


def along_an_axis() -> None:
    x, y = draw(4, 5), draw(4, 5)
    same(mint.cumsum(Tensor(x), 1), x.cumsum(1), "cumsum")
    same(F.mse_loss(Tensor(x), Tensor(y)), ((x - y) ** 2).mean(), "mse_loss")
    check_with_gradient(
        "log_softmax", lambda t: F.log_softmax(t, 1), lambda x: x - np.log(np.exp(x).sum(1, keepdims=True)), x
    )
    check_with_gradient("layer_norm", lambda t: F.layer_norm(t, (5,)), lambda x: normalized(x, 1), x)
    target = np.array([1, 0, 4, 2])

    def losses(x: np.ndarray) -> np.ndarray:
        return (np.log(np.exp(x).sum(1)) - x[np.arange(4), target]).mean()

    check_with_gradient("cross_entropy", lambda t: F.cross_entropy(t, Tensor(target, ms.int64)), losses, x)


def dropout() -> None:
    drawn = []
    for _ in range(2):
        ms.set_seed(3)
        ms.manual_seed(3)
        net = nn.SequentialCell(mint.nn.Dropout(0.25)).set_train()
        x = Tensor(np.ones((200, 100), np.float32))
        y, gradient = ms.value_and_grad(lambda x, net=net: net(x).sum(), 0)(x)
        gradient = gradient.asnumpy()
        kept = gradient != 0
        assert abs(kept.mean() - 0.75) < 0.02, kept.mean()
        np.testing.assert_allclose(gradient[kept], 1 / 0.75, rtol=1e-6)
        np.testing.assert_allclose(float(y), gradient.sum(), rtol=1e-5)
        drawn.append(gradient)
    np.testing.assert_array_equal(*drawn)
    again = ms.grad(lambda x: net(x).sum())(x).asnumpy()
    assert (again != drawn[1]).any()


def random_numbers() -> None:
    normal = mint.randn((100, 100)).asnumpy()
    assert abs(normal.mean()) < 0.05 and abs(normal.std() - 1) < 0.05
    uniform = mint.rand((100, 100)).asnumpy()
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02


def missing_operators() -> None:
    x = Tensor(np.ones((2, 3), np.float32))
    said = []
    for call in (lambda: mint.roll(x, 1, 0), lambda: ops.topk(x, 2)):
        try:
            call()
            ms.runtime.synchronize()
        except RuntimeError as error:
            said.append(str(error))
    first, second = said
    assert "the operator aclnnRoll is not emulated" in first, first
    assert "TopK" in second, second


wrong = {}
for part in (adam_w, nets, batch_norm, along_an_axis, dropout, random_numbers, missing_operators):
    try:
        part()
        wrong[part.__name__] = ""
    except Exception:
        wrong[part.__name__] = traceback.format_exc()
print(json.dumps(wrong))
