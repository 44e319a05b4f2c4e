"""A program runs on the emulated device, and what it did can be read."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "ascend_emulator.md"


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


def test_the_example_of_the_page_runs(emulated):
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert emulated(example).check().stdout.endswith("[]\n")


def test_every_counter_is_on_the_page(emulated):
    counters = emulated("import ascsim\nascsim.mark('begin')\n").check().counters
    for name in counters:
        assert name in PAGE.read_text("utf-8") or name.replace("d2h", "h2d").replace("_bytes", "") in PAGE.read_text(
            "utf-8"
        )
