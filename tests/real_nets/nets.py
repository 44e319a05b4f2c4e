"""The models: small instances of mindcv's own classes, and which of their cells are the blocks.

mindcv and not nets of our own, because its authors knew nothing of this library: blocks that take and give lists and
tuples, take plain numbers, write into their own results, cast, drop paths, and call one random layer twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindcv.models.cait import CaiT, LayerScaleBlockCA, LayerScaleBlockSA
from mindcv.models.convnext import Block as ConvNextBlock
from mindcv.models.convnext import ConvNeXt
from mindcv.models.crossvit import MultiScaleBlock
from mindcv.models.crossvit import VisionTransformer as CrossViT
from mindcv.models.densenet import DenseNet, _DenseLayer
from mindcv.models.dpn import DPN, DualPathBlock
from mindcv.models.efficientnet import EfficientNet, FusedMBConv, FusedMBConvConfig, MBConv, MBConvConfig
from mindcv.models.ghostnet import GhostBottleneck, GhostNet
from mindcv.models.hrnet import HRModule, HRNet
from mindcv.models.mlpmixer import MixerBlock, MLPMixer
from mindcv.models.mobilenetv3 import Bottleneck as MobileNetV3Block
from mindcv.models.mobilenetv3 import MobileNetV3
from mindcv.models.mobilevit import InvertedResidual, MobileViT, MobileViTBlock, get_config
from mindcv.models.poolformer import PoolFormer, PoolFormerBlock
from mindcv.models.pvtv2 import Block as PvtBlock
from mindcv.models.pvtv2 import PyramidVisionTransformerV2
from mindcv.models.regnet import RegNet, ResBottleneckBlock
from mindcv.models.repvgg import RepVGG, RepVGGBlock
from mindcv.models.resnet import Bottleneck, ResNet
from mindcv.models.rexnet import LinearBottleneck, ReXNetV1
from mindcv.models.shufflenetv2 import ShuffleNetV2, ShuffleV2Block
from mindcv.models.squeezenet import Fire, SqueezeNet
from mindcv.models.swintransformer import SwinTransformer, SwinTransformerBlock
from mindcv.models.vit import Block as VitBlock
from mindcv.models.vit import VisionTransformer
from mindspore import Tensor, nn

CLASSES = 5


@dataclass(frozen=True)
class Model:
    """How a model is built, which classes are its blocks, and the side of its square input."""

    build: Callable[[], nn.Cell]
    blocks: tuple[type[nn.Cell], ...]
    size: int = 32


def efficientnet() -> nn.Cell:
    """Both kinds of block, with and without a shortcut; the shortcut drops paths."""
    stages = [
        FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        FusedMBConvConfig(4, 3, 2, 16, 24, 2),
        MBConvConfig(4, 3, 2, 24, 32, 2),
        MBConvConfig(6, 5, 1, 32, 32, 2),
    ]
    return EfficientNet(
        "small", dropout_rate=0.2, num_classes=CLASSES, inverted_residual_setting=stages, drop_path_prob=0.3
    )


def hrnet() -> nn.Cell:
    """Parallel branches, fused by modules that take a list and give one."""

    def stage(branches: int) -> dict:
        channels = [8, 16, 24, 32][:branches]
        return {
            "num_modules": 1,
            "num_branches": branches,
            "block": "BASIC",
            "num_blocks": [1] * branches,
            "num_channels": channels,
        }

    stem = {"num_modules": 1, "num_branches": 1, "block": "BOTTLENECK", "num_blocks": [1], "num_channels": [64]}
    return HRNet({"stage1": stem, "stage2": stage(2), "stage3": stage(3), "stage4": stage(4)}, num_classes=CLASSES)


def mobilevit() -> nn.Cell:
    """Convolutions around transformers, with one transformer layer a block instead of up to four."""
    settings = get_config("xx_small")
    settings["layer2"]["num_blocks"] = 1
    for name in ("layer3", "layer4", "layer5"):
        settings[name].update(transformer_blocks=1, dropout=0.1, ffn_dropout=0.1, attn_dropout=0.1)
    return MobileViT(settings, num_classes=CLASSES)


class ReXNet(ReXNetV1):
    """ReXNet without its own initialisation, which MindSpore refuses since `Tensor.reshape` wants data."""

    def _initialize_weights(self) -> None:
        """`drawn` gives the weights."""


DROPS = {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.3}
"""What transformers take: random layers everywhere."""

MODELS: dict[str, Model] = {
    "CaiT": Model(
        lambda: CaiT(32, 8, num_classes=CLASSES, embed_dim=32, depth=2, num_heads=4, **DROPS),
        (LayerScaleBlockSA, LayerScaleBlockCA),
    ),
    "ConvNeXt": Model(
        lambda: ConvNeXt(
            3, CLASSES, depths=[1, 1, 2, 1], dims=[16, 24, 32, 48], drop_path_rate=0.3, layer_scale_init_value=0.1
        ),
        (ConvNextBlock,),
        size=64,
    ),
    "CrossViT": Model(
        lambda: CrossViT(
            [32, 32],
            [8, 16],
            num_classes=CLASSES,
            embed_dim=(16, 32),
            depth=([1, 1, 0], [1, 1, 0]),
            num_heads=(2, 4),
            **DROPS,
        ),
        (MultiScaleBlock,),
    ),
    "DenseNet": Model(lambda: DenseNet(8, (2, 2, 2, 2), 16, drop_rate=0.2, num_classes=CLASSES), (_DenseLayer,)),
    "DPN": Model(
        lambda: DPN(16, k_r=32, g=8, k_sec=(1, 1, 1, 1), inc_sec=(8, 8, 8, 8), num_classes=CLASSES), (DualPathBlock,)
    ),
    "EfficientNet": Model(efficientnet, (MBConv, FusedMBConv)),
    "GhostNet": Model(lambda: GhostNet(CLASSES, width=0.5), (GhostBottleneck,)),
    "HRNet": Model(hrnet, (HRModule,)),
    "MLP-Mixer": Model(lambda: MLPMixer(2, 8, 16, 32, 16, 64, num_classes=CLASSES), (MixerBlock,)),
    "MobileNetV3": Model(lambda: MobileNetV3("small", 0.5, num_classes=CLASSES), (MobileNetV3Block,)),
    "MobileViT": Model(mobilevit, (InvertedResidual, MobileViTBlock), size=64),
    "PoolFormer": Model(
        lambda: PoolFormer(
            (1, 1, 2, 1),
            (16, 24, 32, 48),
            num_classes=CLASSES,
            drop_rate=0.1,
            drop_path_rate=0.3,
            layer_scale_init_value=0.1,
        ),
        (PoolFormerBlock,),
        size=64,
    ),
    "PVTv2": Model(
        lambda: PyramidVisionTransformerV2(
            64,
            num_classes=CLASSES,
            embed_dims=[8, 16, 24, 32],
            num_heads=[1, 2, 4, 4],
            mlp_ratios=[2, 2, 2, 2],
            depths=[1, 1, 1, 1],
            **DROPS,
        ),
        (PvtBlock,),
        size=64,
    ),
    "RegNet": Model(lambda: RegNet(36.44, 24, 2.49, 6, 8, num_classes=CLASSES, se_r=0.25), (ResBottleneckBlock,)),
    "RepVGG": Model(lambda: RepVGG([1, 1, 1, 1], CLASSES, width_multiplier=[0.25, 0.25, 0.25, 0.25]), (RepVGGBlock,)),
    "ResNet": Model(
        lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=4, base_width=8), (Bottleneck,)
    ),
    "ReXNet": Model(
        lambda: ReXNet(fi_channels=60, initial_channels=8, depth_mult=0.5, num_classes=CLASSES, drop_path_rate=0.3),
        (LinearBottleneck,),
    ),
    "ShuffleNetV2": Model(lambda: ShuffleNetV2(CLASSES, model_size="0.5x"), (ShuffleV2Block,)),
    "SqueezeNet": Model(lambda: SqueezeNet("1_1", CLASSES), (Fire,), size=64),
    "Swin": Model(
        lambda: SwinTransformer(
            32, 2, num_classes=CLASSES, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, **DROPS
        ),
        (SwinTransformerBlock,),
    ),
    "ViT": Model(
        lambda: VisionTransformer(
            32,
            8,
            num_classes=CLASSES,
            embed_dim=32,
            depth=3,
            num_heads=4,
            init_values=0.1,
            pos_drop_rate=0.1,
            proj_drop_rate=0.1,
            **DROPS,
        ),
        (VitBlock,),
    ),
}


def built(name: str) -> nn.Cell:
    """The model in train mode.

    Note: [Equal masks]
    mindcv's random layers are `nn.Dropout`s: each draws its seeds when it is made, and its kernel counts on with every
    call. So nets that are built after the same `ms.set_seed` draw the same masks in the same order, while a replay that
    drew again would get the next ones. Nothing needs to stand in for MindSpore's operators, with one limit: from its
    sixth call on, the kernel splits its work as timing suggests, and the split decides which element gets which number
    (seen in 2.9.0 and 2.10.0). A run therefore calls no random layer more than five times.
    """
    ms.set_seed(1)
    ms.manual_seed(1)
    return drawn(MODELS[name].build()).set_train()


def drawn(net: nn.Cell) -> nn.Cell:
    """The net with every trainable parameter drawn anew, so small that signals neither die nor grow with depth.

    mindcv begins with zeros in many places, and what is multiplied by zero is no evidence.
    """
    for index, parameter in enumerate(net.trainable_params()):
        values = np.random.RandomState(index).randn(*parameter.shape)
        if parameter.ndim > 1:
            values /= np.sqrt(np.prod(parameter.shape[1:]))
        else:
            values = 0.1 * values + parameter.name.endswith("gamma")
        parameter.set_data(Tensor(values.astype(np.float32)))
    return net


def blocks_of(net: nn.Cell, name: str) -> list[nn.Cell]:
    """The model's blocks, in the order of its cells."""
    found = [cell for _, cell in net.cells_and_names() if isinstance(cell, MODELS[name].blocks)]
    assert len(found) > 1
    return found
