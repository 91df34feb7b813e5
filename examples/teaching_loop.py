"""The whole method in one file: a tree over characters, noise that climbs it, a network that predicts children, a bound,
a sampler. Needs torch alone (the text ships with the package). About a minute on a laptop:

    python examples/teaching_loop.py

The package does the same with any tree, any process, gathered heads and proofs; nothing here is imported from it.
"""
import json
import lzma
import math
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
HERE = Path(__file__).resolve().parent.parent

# --- text: the characters of three novels -------------------------------------------------------------------------------
with lzma.open(HERE / "tdlm/assets/novels.train.jsonl.xz", "rt") as novels:
    text = " ".join(json.loads(line)["text"] for line in novels)
text = " ".join("".join(c if c in "abcdefghijklmnopqrstuvwxyz ,.;'\"!?-" else " " for c in text.lower()).split())
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])
V, S = len(letters), 64

# --- a tree: vowels, common consonants, rare consonants, signs. Height 2: letter -> class -> root -----------------------
classes = ["aeiou", "tnshrdl", "bcfgjkmpqvwxyz", " ,.;'\"!?-"]
CLASS, ROOT, N = V, V + len(classes), V + len(classes) + 1            # node ids: letters, classes, root
parent = torch.tensor([CLASS + next(k for k, group in enumerate(classes) if c in group) for c in letters])
children = [[letters.index(c) for c in group if c in letters] for group in classes] + [list(range(CLASS, ROOT))]
K = max(map(len, children))
num_children = torch.tensor([1] * V + [len(kids) for kids in children])
child = torch.tensor([kids + [0] * (K - len(kids)) for kids in children])                    # child[u - V, slot]
slot = torch.tensor([children[p - V].index(c) for c, p in enumerate(parent.tolist())])       # of a letter in its class
H = 2
ancestor = torch.stack([torch.arange(V), parent, torch.full((V,), ROOT)])                    # ancestor[height, letter]
slots = torch.stack([slot, parent - CLASS])                                                  # slots[level, letter]


# --- the network: node ids in, a hidden state out; the head scores K slots and hides those a node does not have --------
class Network(nn.Module):
    def __init__(self, d=96, layers=2):
        super().__init__()
        self.node, self.place, self.level = nn.Embedding(N, d), nn.Embedding(S, d), nn.Embedding(H, d)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, K)

    def forward(self, z, level):
        hidden = self.body(self.node(z) + self.place.weight[: z.shape[1]] + self.level(level)[:, None])
        hide = torch.arange(K) >= num_children[z][..., None]
        return self.head(hidden).masked_fill(hide, -1e9).log_softmax(-1)


# --- noise and bound: within level l a position stands at height l with alpha = 1 - u, at height l+1 with u -------------
def loss(network, x):
    B = len(x)
    t = (torch.randperm(B) + torch.rand(())) / B                 # one time per sequence, spread evenly over [0, 1]
    level = (t * H).long()
    u = t * H - level
    moved = torch.rand(B, S) < u[:, None]
    z = ancestor[level[:, None] + moved, x]
    log_p = network(z, level)
    cross_entropy = -log_p.gather(-1, slots[level[:, None], x][..., None])[..., 0]
    active = moved & (num_children[z] > 1)
    # weight: -alpha' / (1 - alpha) = 1/u in local time, times H because t was drawn over all H levels
    bound = torch.where(active, cross_entropy * (H / u)[:, None], 0).sum(1) / S
    train = torch.where(active, cross_entropy * (H / u).clamp(max=2 * H)[:, None], 0).mean()
    return train, bound


# --- sampling: down one level at a time; a position moves with (u_t - u_s) / u_t and then asks which child -------------
@torch.no_grad()
def sample(network, count, steps=64):
    z = torch.full((count, S), ROOT)
    for level in reversed(range(H)):
        waiting = torch.ones(count, S, dtype=torch.bool)
        for step in range(steps // H, 0, -1):
            u_t, u_s = step * H / steps, (step - 1) * H / steps
            p = network(z, torch.full((count,), level)).exp()
            pick = torch.multinomial(p.view(-1, K), 1).view(count, S)
            go = waiting & (torch.rand(count, S) < (u_t - u_s) / u_t)
            z = torch.where(go, child[(z - V).clamp(min=0), pick], z)
            waiting &= ~go
    return ["".join(letters[i] for i in row) for row in z.tolist()]


def main(steps=600, batch=64):
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.99))
    counts = torch.bincount(data, minlength=V).double()
    unigram = -(counts / counts.sum() * (counts / counts.sum()).log()).sum()
    in_class = torch.tensor([math.log(len(children[p - V])) for p in parent.tolist()], dtype=torch.float64)
    uniform = math.log(len(classes)) + float((in_class * counts).sum() / len(data))
    print(f"{len(data):,} characters; a uniform choice of children costs {uniform:.3f} nats a character, unigram {unigram:.3f}")
    running = 0.0
    for step in range(1, steps + 1):
        start = torch.randint(len(data) - S, (batch,))
        train, bound = loss(network, data[start[:, None] + torch.arange(S)])
        optimizer.zero_grad()
        train.backward()
        optimizer.step()
        running += float(bound.detach().mean())
        if step % 100 == 0:
            print(f"step {step:4d}  bound {running / 100:.3f} nats a character")
            running = 0.0
    print("\n".join(sample(network, 4)))


if __name__ == "__main__":
    main()
