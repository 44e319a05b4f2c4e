"""A program runs on the emulated device, and what it did can be read."""


def test_a_program_trains_a_step(emulated):
    done = emulated(
        """
        import json
        import numpy as np
        import mindspore as ms
        from mindspore import mint, nn

        ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
        net = nn.SequentialCell(mint.nn.Linear(8, 16), mint.nn.GELU(), mint.nn.Linear(16, 4))
        step = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
        loss, grads = step(ms.Tensor(np.ones((4, 8), np.float32)))
        print(json.dumps([float(loss), [list(g.shape) for g in grads]]))
        """,
        trace=True,
    )
    _, shapes = done.json()
    assert shapes == [[16, 8], [16], [4, 16], [4]]
    assert done.counters["calls"]["aclnnAddmm"] == 2
    assert [call["name"] for call in done.trace].count("aclnnAddmm") == 2
