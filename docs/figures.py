"""Draws the README's figure: `python docs/figures.py` writes docs/img/five_graphs.png."""

from pathlib import Path

import matplotlib.pyplot as plt

from mpnn import graphs

N = 48
MODELS = {
    "BERT\ncomplete()": graphs.complete(),
    "GPT\ncausal()": graphs.causal(),
    "Mistral\ncausal() & window(8)": graphs.causal() & graphs.window(8),
    "Longformer\nlongformer(12, globals=2)": graphs.longformer(12, globals=2),
    "BigBird\nbigbird(4, 3, 2, 1)": graphs.bigbird(block=4, window=3, random=2, globals=1),
}

figure, axes = plt.subplots(1, len(MODELS), figsize=(15, 4.4), layout="constrained")
for ax, (title, topology) in zip(axes, MODELS.items(), strict=True):
    topology.bind(N).plot(ax, title=title)
    if ax is not axes[0]:
        ax.set_ylabel("")
figure.savefig(Path(__file__).parent / "img" / "five_graphs.png", dpi=110, bbox_inches="tight")
