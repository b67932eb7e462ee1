"""Programs after public threads: what is said of each, and what must not be; no fix trains anything else.

The words were written before the first run of each.
"""

import re

import pytest

from hodiff.cli import main
from tests.programs.test_programs import process  # noqa: F401 -- a fixture

START = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n"
# The thread, the program, what is said, what is not.
THREADS = {
    "frozen_backbone": (
        "jina-ai/finetuner#435",
        """
body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
def build(freeze):
    if freeze:
        for param in body.parameters():
            param.requires_grad = False
    return body
model = build(freeze=True)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
a, p, n = (model(torch.randn(5, 6)) for _ in range(3))
loss = F.triplet_margin_loss(a, p, n)
opt.zero_grad()
loss.backward()
""",
        [
            r"`loss` has no graph",
            r"frozen .*\.0\.weight",
            r"switched off .*param\.requires_grad = False",
            r"layer on\s+top",
        ],
        [r"fix 1", r"detach\(\) or"],
    ),
    "wrong_name_frozen": (
        "AaronComo/LipFD#18",
        """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        for name, p in self.model.named_parameters():
            if name.split('.')[0] == "fc": p.requires_grad = True
            else: p.requires_grad = False
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
    def optimize(self, x, y):
        self.output = self.model(x)
        self.loss = F.binary_cross_entropy_with_logits(self.output, y)
        self.optimizer.zero_grad()
        self.loss.backward()
t = Trainer()
t.optimize(torch.randn(4, 3), torch.rand(4, 1))
""",
        [r"frozen", r"switched off .*else: p\.requires_grad = False", r"requires_grad=False"],
        [r"fix 1", r"hodiff explain"],
    ),
    "forward_in_inference_mode": (
        "meta-llama/llama#122",
        """
class GPT(nn.Module):
    def __init__(self):
        super().__init__(); self.emb = nn.Embedding(10, 4); self.out = nn.Linear(4, 10)
    @torch.inference_mode()
    def forward(self, ids): return self.out(self.emb(ids))
model = GPT()
optimizer = torch.optim.Adam(model.parameters())
ids = torch.randint(10, (2, 5))
logits = model(ids)
loss = F.cross_entropy(logits.view(-1, 10), ids.view(-1))
loss.backward()
""",
        [r"switched off", r"inference_mode"],
        [r"retain_graph"],
    ),
    "argmax_before_the_loss": (
        "ronghuaiyang/arcface-pytorch#56",
        """
model = nn.Linear(5, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(2):
    output = model(torch.randn(4, 5))
    predicted = output.argmax(dim=1).float()
    loss = F.mse_loss(predicted, torch.tensor([0., 1., 2., 1.]))
    opt.zero_grad(); loss.backward(); opt.step()
""",
        [r"cut at .*predicted = output\.argmax", r"integers or booleans", r"fix 1: .*cross_entropy takes logits"],
        [r"detach"],
    ),
    "attached_fake": (
        "KupynOrest/DeblurGAN#91",
        """
g, d = nn.Linear(2, 3), nn.Linear(3, 1)
opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
for i in range(3):
    real, z = torch.randn(4, 3), torch.randn(4, 2)
    fake = g(z)
    opt_d.zero_grad()
    d_loss = d(fake).mean() - d(real).mean()
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = -d(fake).mean()
    g_loss.backward()
    opt_g.step()
""",
        [r"`fake`", r"belongs to both losses", r"fix 1: .*fake\.detach\(\)"],
        [r"fix \d: pass retain_graph"],
    ),
    "two_losses_one_step": (
        "naver-ai/StyleMapGAN#16",
        """
net = nn.Linear(3, 4); head = nn.Linear(4, 1)
opt = torch.optim.Adam([*net.parameters(), *head.parameters()])
code = net(torch.randn(5, 3)).relu()
adv_loss = F.softplus(-head(code)).mean()
w_rec_loss = (code - 1).square().mean()
opt.zero_grad()
adv_loss.backward()
(w_rec_loss * 0.5).backward()
opt.step()
""",
        [r"`code`", r"belongs to both losses", r"fix 1: one pass for both"],
        [r"detach"],
    ),
    "conv_outside_the_loop": (
        "lucidrains/denoising-diffusion-pytorch#109",
        """
x = torch.randn(8, 2, 16)
conv = nn.Conv1d(2, 4, 3, padding=1)
data = conv(x)
model = nn.Conv1d(4, 4, 3, padding=1)
opt = torch.optim.Adam(model.parameters())
for step in range(3):
    loss = F.mse_loss(model(data), torch.randn(8, 4, 16))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        [r"`data`", r"was built once, outside the loop", r"conv\.(weight|bias)|move"],
        [r"fix \d: pass retain_graph"],
    ),
    "refined_in_steps": (
        "yuval-alaluf/restyle-encoder#15",
        """
net = nn.Linear(6, 3)
opt = torch.optim.Adam(net.parameters())
x = torch.randn(4, 3)
y_hat = torch.zeros(4, 3)
for it in range(3):
    y_hat = net(torch.cat([x, y_hat], 1)).tanh()
    loss = (y_hat - x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        [r"`y_hat`", r"state from a previous step", r"fix 1: after .*write\s+y_hat = y_hat\.detach\(\)"],
        [r"fix \d: pass retain_graph"],
    ),
    "gdpp_after_the_adversarial_pass": (
        "facebookresearch/pytorch_GAN_zoo#83",
        """
g, body, head = nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1)
opt_g = torch.optim.Adam(g.parameters())
fake = g(torch.randn(5, 2))
phi = body(fake).relu()
loss_fake = -head(phi).mean()
opt_g.zero_grad()
loss_fake.backward()
loss_gdpp = (phi.t() @ phi).square().mean()
loss_gdpp.backward()
opt_g.step()
""",
        [
            r"`phi`",
            r"belongs to both losses",
            r"fix 1: (one pass for both|pass retain_graph=True at .*loss_fake\.backward)",
        ],
        [r"fix \d: .*detach"],
    ),
    "one_loss_of_each_device": (
        "winycg/L-MCL#1",
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def replicas(x, y): return torch.stack([F.cross_entropy(net(a), b) for a, b in zip(x.chunk(2), y.chunk(2))])
loss = replicas(torch.randn(8, 3), torch.randint(2, (8,)))
loss.backward()
""",
        [r"`loss` has shape \(2,\)", r"loss\.mean\(\) or loss\.sum\(\)", r"computed at"],
        [],
    ),
    "regularisation_of_rows": (
        "sh0416/bpr#13",
        """
class BPR(nn.Module):
    def __init__(self):
        super().__init__(); self.W = nn.Parameter(torch.randn(5, 3)); self.H = nn.Parameter(torch.randn(6, 3))
    def forward(self, u, i, j):
        u, i, j = self.W[u], self.H[i], self.H[j]
        log_prob = F.logsigmoid((u * i).sum(1) - (u * j).sum(1)).sum()
        reg = 0.1 * (u.norm(dim=1).pow(2) + i.norm(dim=1).pow(2) + j.norm(dim=1).pow(2))
        return -log_prob + reg
model = BPR()
loss = model(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5]))
loss.backward()
""",
        [r"`loss` has shape \(2,\)", r"return -log_prob \+ reg", r"mean\(\) or .*sum\(\)"],
        [],
    ),
    "activations_by_perturbation": (
        "Animadversio/GAN-Geometry#4",
        """
net = nn.Linear(4, 3)
perturb_vecs = torch.zeros(2, 4, requires_grad=True)
activs = net(perturb_vecs)
ftgrad = torch.autograd.grad(activs, perturb_vecs, retain_graph=False)[0]
""",
        [r"`activs` has shape \(2, 3\)", r"activs\.mean\(\) or activs\.sum\(\)", r"hodiff\.jacobian"],
        [],
    ),
    "unused_pooler": (
        "learnables/learn2learn#314",
        """
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pooler, self.classifier = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x): return self.classifier(self.body(x).relu())
model = ViT()
loss = F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]))
grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
""",
        [
            r"not in the graph: `model\.pooler\.weight`, `model\.pooler\.bias`",
            r"in the graph: .*`model\.body",
            r"fix 1: .*allow_unused=True",
        ],
        [r"detach\(\) there"],
    ),
    "second_adaptation_step": (
        "tristandeleu/pytorch-meta#91",
        """
model = nn.Linear(3, 1)
params = dict(model.named_parameters())
x, y = torch.randn(4, 3), torch.randn(4, 1)
for step in range(2):
    loss = F.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    params = {k: v - 0.1 * g for (k, v), g in zip(params.items(), grads)}
""",
        [r"not in the graph: `params\[", r"in the graph: .*`model\.", r"the loss was computed without it"],
        [r"cut at"],
    ),
    "state_over_a_stream": (
        "pytorch/pytorch#2198",
        """
rnn = nn.LSTM(4, 8)
hidden = None
for i in range(400):
    data = torch.rand(5, 2, 4)
    out, hidden = rnn(data, hidden)
""",
        [r"`hidden` holds the graphs of [1-3]?\d\d iterations", r"no backward pass has gone", r"out, hidden = rnn"],
        [r"[4-9]\d\d iterations", r"\d{4} iterations"],
    ),
    "replay_with_hidden_states": (
        "oxwhirl/pymarl#73",
        """
agent = nn.GRUCell(3, 4); q = nn.Linear(4, 2)
opt = torch.optim.Adam([*agent.parameters(), *q.parameters()])
class Buffer:
    def __init__(self): self.episodes = []
    def insert(self, item): self.episodes.append(item)
buffer = Buffer()
for episode in range(120):
    h = torch.zeros(1, 4)
    h = agent(torch.randn(1, 3), h)
    buffer.insert({"hidden": h, "reward": 1.0})
    loss = q(agent(torch.randn(1, 3), torch.zeros(1, 4))).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
        [r"`buffer\.episodes` holds the graphs of \d{2,3} iterations", r"grows at .*self\.episodes\.append\(item\)"],
        [r"\d{4} iterations"],
    ),
    "total_loss": (
        "pytorch forum: running loss",
        """
net = nn.Linear(3, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1)
total_loss = 0
for i in range(100):
    loss = net(torch.randn(4, 3)).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    total_loss += loss
print(total_loss.item() > 0)
""",
        [
            r"`total_loss` holds the graphs of \d\d iterations",
            r"grows at .*total_loss \+= loss",
            r"fix: .*`\.item\(\)`",
        ],
        [],
    ),
    "policy_after_q": (
        "MrSyee/pg-is-all-you-need#30",
        """
qf, actor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(3, 1)
qf_opt, actor_opt = torch.optim.Adam(qf.parameters()), torch.optim.Adam(actor.parameters())
s, a, r = torch.randn(5, 3), torch.randn(5, 1), torch.randn(5, 1)
q_loss = F.mse_loss(qf(torch.cat([s, a], 1)), r)
actor_loss = -qf(torch.cat([s, actor(s).tanh()], 1)).mean()
qf_opt.zero_grad(); q_loss.backward(); qf_opt.step()
actor_opt.zero_grad(); actor_loss.backward(); actor_opt.step()
""",
        [
            r"`qf\.2\.weight` was changed in place",
            r"changed at .*qf_opt\.step\(\)",
            r"fix 1: compute `actor_loss` again after",
        ],
        [r"detach", r"clone"],
    ),
    "policy_in_functions": (
        "toshikwa/soft-actor-critic.pytorch#1",
        """
class Agent:
    def __init__(self):
        self.critic, self.policy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(3, 1)
        self.q_optim = torch.optim.Adam(self.critic.parameters())
        self.policy_optim = torch.optim.Adam(self.policy.parameters())
    def calc_critic_loss(self, s): return self.critic(torch.cat([s, torch.randn(5, 1)], 1)).square().mean()
    def calc_policy_loss(self, s): return -self.critic(torch.cat([s, self.policy(s)], 1)).mean()
    def learn(self):
        s = torch.randn(5, 3)
        q_loss = self.calc_critic_loss(s)
        policy_loss = self.calc_policy_loss(s)
        update_params(self.q_optim, q_loss)
        update_params(self.policy_optim, policy_loss)
def update_params(optim, loss):
    optim.zero_grad()
    loss.backward()
    optim.step()
Agent().learn()
""",
        [
            r"critic\.2\.weight` was changed in place",
            r"changed at .*optim\.step\(\)",
            r"update_params\(self\.q_optim, q_loss\)",
            r"fix 1: compute `(policy_)?loss` again after",
        ],
        [r"detach"],
    ),
    "adapter_behind_a_checkpoint": (
        "huggingface/peft#1142",
        """
from torch.utils.checkpoint import checkpoint
emb, lora = nn.Embedding(10, 4).requires_grad_(False), nn.Linear(4, 4)
opt = torch.optim.Adam(lora.parameters())
h = checkpoint(lora, emb(torch.tensor([1, 2, 3])), use_reentrant=True)
loss = h.square().mean()
loss.backward()
""",
        [r"re-entrant checkpoint", r"cut at .*h = checkpoint\(", r"fix 1: .*use_reentrant=False"],
        [r"frozen"],
    ),
    "mask_after_softmax": (
        "attention masks in place (several repositories)",
        """
q = nn.Linear(4, 4)
x = torch.randn(3, 4)
scores = torch.softmax(q(x) @ x.t(), -1)
scores[:, 0] = 0
loss = (scores @ x).sum()
loss.backward()
""",
        [
            r"`scores` was changed in place, after SoftmaxBackward0",
            r"changed at .*scores\[:, 0\] = 0",
            r"clone\(\)|new tensor",
        ],
        [r"fix \d: .*retain"],
    ),
    "discriminator_left_frozen": (
        "junyanz/pytorch-CycleGAN-and-pix2pix (set_requires_grad)",
        """
netG, netD = nn.Linear(2, 3), nn.Linear(3, 1)
opt_G, opt_D = torch.optim.Adam(netG.parameters()), torch.optim.Adam(netD.parameters())
def set_requires_grad(net, value):
    for param in net.parameters():
        param.requires_grad = value
for i in range(2):
    real, fake = torch.randn(4, 3), netG(torch.randn(4, 2))
    loss_D = netD(fake.detach()).mean() - netD(real).mean()
    opt_D.zero_grad(); loss_D.backward(); opt_D.step()
    set_requires_grad(netD, False)
    loss_G = -netD(fake).mean()
    opt_G.zero_grad(); loss_G.backward(); opt_G.step()
""",
        [
            r"`loss_D` has no graph",
            r"`netD\.weight`",
            r"set_requires_grad\(netD, False\)|param\.requires_grad = value",
            r"requires_grad_\(True\)",
        ],
        [r"fix \d: leave out the detach"],
    ),
    "rounded_output": (
        "rounded predictions (forum)",
        """
net = nn.Linear(3, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1)
out = net(torch.randn(4, 3))
y = torch.tensor([[1], [0], [2], [1]])
loss = (out.long() - y).float().abs().mean()
loss.backward()
""",
        [r"`loss` has no graph", r"cut at .*out\.long\(\)", r"integers or booleans", r"leave the values as they are"],
        [],
    ),
    "codebook_lookup": (
        "vector quantisation: gradient by the encoder's output",
        """
encoder, codebook = nn.Linear(3, 2), nn.Embedding(4, 2)
z = torch.randn(5, 2, requires_grad=True)
index = torch.cdist(z, codebook.weight).argmin(1)
quantised = codebook(index)
loss = quantised.square().mean()
grad = torch.autograd.grad(loss, z)
""",
        [r"not in the graph: `z`", r"cut at .*index = torch\.cdist", r"integers or booleans"],
        [r"another tensor of that name"],
    ),
    "generator_step_first": (
        "human motion networks: E first, then D",
        """
encoder, disc = nn.Linear(3, 4), nn.Linear(4, 1)
e_opt, d_opt = torch.optim.Adam(encoder.parameters()), torch.optim.Adam(disc.parameters())
for i in range(2):
    pose = encoder(torch.randn(6, 3))
    out = disc(pose)
    e_loss = (out - 1).square().mean()
    d_loss = out.square().mean() + (disc(torch.randn(6, 4)) - 1).square().mean()
    e_opt.zero_grad(); e_loss.backward(); e_opt.step()
    d_opt.zero_grad(); d_loss.backward(); d_opt.step()
""",
        [
            r"`out`",
            r"belongs to both losses",
            r"fix 1: compute `out` and `d_loss` once more, from pose\.detach\(\)",
            r"has changed encoder\.(bias|weight)",
        ],
        [r"retain_graph=True at", r"changed .*disc"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", THREADS)
def test_a_program_after_a_thread_is_explained(name, tmp_path, capsys, process):  # noqa: F811
    _, text, said, unsaid = THREADS[name]
    path = tmp_path / "program.py"
    path.write_text(START + text, "utf-8")
    main(["explain", str(path)])
    words = " ".join(capsys.readouterr().err.split("hodiff: ", 1)[1].split())
    for each in said:
        assert re.search(each, words), words
    for each in unsaid:
        assert not re.search(each, words), words
