"""Three uses of second derivatives of attention over graphs: forces, learning to adapt, influence.

1. A potential whose energy is attention over neighbors within 2.2, trained on energies and forces of clusters of
   Lennard-Jones atoms. The loss holds the first derivative of the energy, so a step needs the second.
2. MAML (Finn et al. 2017): the start from which one step of gradient descent fits a new signal over a ring best. The
   gradient of the loss after the step goes through the step.
3. Influence (Koh and Liang 2017): how the loss at one node changes if another node counts for a tenth less in training,
   by a product with the inverse Hessian, compared with what training again gives.

    python examples/second_derivatives.py                a minute
    python examples/second_derivatives.py --steps 2      a quick test
"""

import argparse

import torch
from torch import Tensor, nn

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import DotProduct
from mpnn.update import PreNorm

HEADS, WIDTH, REACH = 4, 8, 2.2


def lennard_jones(positions: Tensor) -> Tensor:
    pairs = torch.pdist(positions)
    return (pairs**-12 - 2 * pairs**-6).sum()


class Potential(nn.Module):
    """The sum over atoms of a network of what they attend to. Distances are biases of the logits and values."""

    def __init__(self) -> None:
        super().__init__()
        self.to_bias = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, HEADS))
        self.to_value = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, HEADS * WIDTH))
        self.query = nn.Parameter(torch.randn(HEADS, WIDTH))
        self.energy = nn.Sequential(nn.Linear(HEADS * WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, positions: Tensor) -> Tensor:
        graph = graphs.radius(positions.detach(), REACH)
        src, dst = graph.edge_index
        distance = (positions[src] - positions[dst]).square().sum(-1).sqrt()
        inside = 0.5 * (1 + torch.cos(torch.pi * distance / REACH))[:, None]
        basis = torch.exp(-((distance[:, None] - torch.linspace(0.7, REACH, 16)) ** 2) / 0.02)
        atoms = ops.aggregate(
            graph, positions.new_ones(len(positions), HEADS * WIDTH), weight=inside * self.to_value(basis)
        )
        features = atoms.unflatten(-1, (HEADS, WIDTH))
        query = features + self.query
        out = ops.attend(graph, query, features, features, bias=self.to_bias(basis) + inside.log(), normalize="softmax")
        return self.energy(torch.tanh(out).flatten(1) + atoms).sum()


def forces(steps: int) -> None:
    torch.manual_seed(0)
    near = torch.stack(torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij"), -1).view(-1, 3)
    clusters = [(near + 0.04 * torch.randn(8, 3)).requires_grad_() for _ in range(48)]
    labels = []
    for x in clusters:
        energy = lennard_jones(x)
        labels.append((energy.detach(), -torch.autograd.grad(energy, x)[0]))
    unit = torch.cat([f for _, f in labels]).square().mean().sqrt()
    middle = torch.stack([e for e, _ in labels]).mean()
    labels = [((e - middle) / unit, f / unit) for e, f in labels]
    model = Potential()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def error(k: int) -> tuple[Tensor, Tensor]:
        energy = model(clusters[k])
        (gradient,) = torch.autograd.grad(energy, clusters[k], create_graph=True)
        return (energy - labels[k][0]) ** 2 / 100, (gradient + labels[k][1]).square().mean()

    def tested() -> float:
        return float(torch.stack([error(k)[1] for k in range(32, 48)]).mean().sqrt())

    before = tested()
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((sum(error(k)) for k in range(step % 4 * 8, step % 4 * 8 + 8)), torch.zeros(()))
        loss.backward()
        optimizer.step()
    print(f"forces     error on new clusters, of their root mean square: {before:.2f} -> {tested():.2f}")


def learn_to_adapt(steps: int = 60) -> None:
    torch.manual_seed(0)
    ring = graphs.window(2).bind(32)
    layer = MessagePassing(ring, "sum", PreNorm(16), DotProduct(16, 4))
    head, encode = nn.Linear(16, 1), nn.Linear(2, 16)
    model = nn.Sequential(encode, layer, head)
    angle = torch.arange(32) / 32 * 2 * torch.pi
    x = torch.stack([angle.sin(), angle.cos()], -1)

    def task() -> Tensor:
        phase, size = torch.rand(2)
        return ((1 + size) * torch.sin(angle + 6.28 * phase))[:, None]

    def after_a_step(target: Tensor) -> tuple[Tensor, Tensor]:
        weights = dict(model.named_parameters())
        even, odd = slice(0, None, 2), slice(1, None, 2)
        loss = (model(x)[even] - target[even]).square().mean()
        step = torch.autograd.grad(loss, list(weights.values()), create_graph=True, allow_unused=True)
        moved = {k: w if g is None else w - 0.1 * g for (k, w), g in zip(weights.items(), step, strict=True)}
        adapted = torch.func.functional_call(model, moved, (x,))
        return loss, (adapted[odd] - target[odd]).square().mean()

    optimizer, told = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([after_a_step(task())[1] for _ in range(4)]).mean()
        loss.backward()
        optimizer.step()
        told.append(float(loss))
    print(f"adaptation loss at unseen nodes after one step: {sum(told[:5]) / 5:.2f} -> {sum(told[-5:]) / 5:.2f}")


def influence() -> None:
    torch.manual_seed(0)
    graph = graphs.from_edges(torch.randint(0, 20, (2, 80)), 20).with_self_loops()
    x, target = torch.randn(20, 2, 4).double(), torch.randn(20, 2, 3).double()

    def losses(weight: Tensor) -> Tensor:
        out = ops.attend(graph, x @ weight[:, :4], x, x @ weight[:, 4:])
        return (out - target).square().mean((1, 2)) + 0.05 * weight.square().sum() / 20

    def fitted(start: Tensor, less: int | None = None) -> Tensor:
        keep = torch.ones(20, dtype=torch.float64)
        if less is not None:
            keep[less] = 0.9
        weight = start.clone().requires_grad_()
        solver = torch.optim.LBFGS([weight], max_iter=400, tolerance_grad=1e-11, tolerance_change=1e-14)

        def closure() -> Tensor:
            solver.zero_grad()
            loss = (keep * losses(weight)).sum()
            loss.backward()
            return loss

        solver.step(closure)
        return weight.detach()

    best = fitted(torch.zeros(4, 7, dtype=torch.float64))
    hessian = torch.func.hessian(lambda w: losses(w).sum())(best).reshape(28, 28)
    gradients = torch.func.jacrev(losses)(best).reshape(20, 28)
    guessed, found = [], []
    for k in range(1, 9):
        guessed.append(0.1 * float(gradients[0] @ torch.linalg.solve(hessian, gradients[k])))
        found.append(float(losses(fitted(best, k))[0] - losses(best)[0]))
    r = torch.corrcoef(torch.tensor([guessed, found]))[0, 1]
    print(f"influence  correlation of the estimate with training again {float(r):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps of the potential")
    torch.set_num_threads(1)
    forces(parser.parse_args().steps)
    learn_to_adapt()
    influence()
