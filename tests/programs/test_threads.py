"""Programs after public threads: which facts are told of each, and which must not be, and the class of the failure."""

import re

import pytest

from hodiff.cli import main
from tests.support.releases import CHANGES, marked

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
        ["no graph `loss`", r"frozen .*\.0\.weight", r"off since .*param\.requires_grad = False"],
        [],
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
        ["frozen", r"off since .*else: p\.requires_grad = False", "requires_grad=False"],
        [],
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
        ["off since", "inference_mode"],
        [],
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
        [r"cut .*predicted = output\.argmax", "integers or booleans"],
        [],
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
        ["`fake`", "=> shared part: "],
        [],
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
        ["`code`", "=> shared part: "],
        [],
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
        ["`data`", "=> made once: "],
        [],
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
        ["`y_hat`", "=> carried over: "],
        [],
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
        ["`phi`", "=> shared part: "],
        [],
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
        [r"`loss`: it has shape \(2,\)", "made"],
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
        [r"`loss`: it has shape \(2,\)", r"return -log_prob \+ reg"],
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
        [r"`activs`: it has shape \(2, 3\)"],
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
        [r"unused .*`model\.pooler\.weight`", r"unused .*`model\.pooler\.bias`", r"in graph .*`model\.body"],
        [],
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
        [r"unused .*`params\[", r"in graph .*`model\."],
        ["cut "],
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
        [r"saved .*qf\.2\.weight`", r"changed .*qf_opt\.step\(\)"],
        [],
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
        [r"saved .*critic\.2\.weight`", r"changed .*optim\.step\(\)", r"update_params\(self\.q_optim, q_loss\)"],
        [],
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
        ["=> checkpoint: ", r"cut .*h = checkpoint\("],
        ["frozen"],
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
        ["saved .*scores`", r"changed .*scores\[:, 0\] = 0"],
        [],
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
        ["no graph `loss_D`", r"`netD\.weight`", r"set_requires_grad\(netD, False\)|param\.requires_grad = value"],
        [],
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
        ["no graph `loss`", r"cut .*out\.long\(\)", "integers or booleans"],
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
        ["unused .*`z`", r"cut .*index = torch\.cdist", "integers or booleans"],
        [],
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
        ["`out`", "=> shared part: ", r"changed .*encoder\.(bias|weight)"],
        ["changed .*disc"],
    ),
    "cell_of_a_notebook_run_again": (
        "karpathy/nn-zero-to-hero#31",
        """
xs, ys = torch.tensor([0, 5, 13, 13, 1]), torch.tensor([5, 13, 13, 1, 0])
W = torch.randn((27, 27), requires_grad=True)
xenc = F.one_hot(xs, num_classes=27).float()
logits = xenc @ W
counts = logits.exp()
prob = counts / counts.sum(1, keepdim=True)
loss = -prob[torch.arange(5), ys].log().mean()
for k in range(2):
    W.grad = None
    loss.backward()
    W.data += -0.1 * W.grad
""",
        ["`loss`", "=> same loss twice: "],
        [],
    ),
    "spiking_state": (
        "jeshraghian/snntorch#250",
        """
class Leaky(nn.Module):
    def __init__(self, beta=0.9):
        super().__init__()
        self.beta, self.mem = beta, torch.zeros(1)
    def forward(self, x):
        self.mem = self.beta * self.mem + x
        spk = torch.sigmoid(5 * (self.mem - 1))
        return spk, self.mem
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.lif = nn.Linear(4, 3), Leaky()
    def forward(self, x): return self.lif(self.fc(x))
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for i in range(3):
    data, targets = torch.randn(6, 4), torch.randint(3, (6,))
    spk_rec = []
    for step in range(5):
        spk_out, mem_out = net(data)
        spk_rec.append(spk_out)
    loss = F.cross_entropy(torch.stack(spk_rec).sum(0), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        [r"net\.lif\.mem|self\.mem", "=> carried over: "],
        ["inside forward"],
    ),
    "prompt_embedded_once": (
        "tejank10/null-text-inversion#1",
        """
text_encoder, unet = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)), nn.Linear(8, 4)
cond = text_encoder(torch.tensor([1, 2]))
uncond = text_encoder(torch.tensor([0, 0])).detach().requires_grad_()
optimizer = torch.optim.Adam([uncond], lr=1e-2)
latent, target = torch.randn(2, 4), torch.randn(2, 4)
for i in range(3):
    eps_uncond = unet(torch.cat([latent, uncond], 1))
    eps_cond = unet(torch.cat([latent, cond], 1))
    loss = F.mse_loss(eps_uncond + 7.5 * (eps_cond - eps_uncond), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        ["`cond`", "=> made once: "],
        [],
    ),
    "second_derivative_of_a_line": (
        "pytorch/pytorch#32304",
        """
def second_deriv(y, x):
    first = torch.autograd.grad(y, x, create_graph=True)[0]
    second = torch.autograd.grad(first, x, create_graph=True)[0]
    return second
x = torch.tensor(1.0, requires_grad=True)
second_deriv(x**2, x)
second_deriv(x*2, x)
""",
        ["no graph `first`"],
        [],
    ),
    "second_gradient_by_the_first": (
        "pytorch/pytorch#60027",
        """
x = torch.rand(40, 12, requires_grad=True)
A = nn.Linear(12, 1)
y = A(x)
g, = torch.autograd.grad(inputs=x, outputs=y, grad_outputs=torch.ones_like(y))
g2, = torch.autograd.grad(inputs=g, outputs=y, grad_outputs=torch.ones_like(y))
""",
        ["no grad .*`g`", "cut .*g, = torch"],
        [],
    ),
    "linear_network_twice": (
        "pytorch/pytorch#38506",
        """
inp = torch.randn(12, requires_grad=True)
model = nn.Sequential(nn.Linear(12, 1))
out = model(inp)
grad = torch.autograd.grad(out, inp, create_graph=True)[0]
grad2 = torch.autograd.grad(grad.sum(), inp)[0]
""",
        ["unused .*`inp`", "made .*create_graph=True"],
        [],
    ),
    "gradient_by_minus_x": (
        "ilia10000/dataset-distillation#3",
        """
x = torch.rand(10, requires_grad=True)
output = (2 * x).sum()
grad_x, = torch.autograd.grad(output, -x)
""",
        [r"unused .*-x\)", "made after the loss"],
        [],
    ),
    "noise_that_does_not_enter": (
        "archinetai/smart-pytorch#5",
        """
model = nn.Linear(4, 2)
embed = torch.randn(3, 4)
def eval_fn(perturbed): return model(embed)
def smart(embed, state):
    noise = torch.randn_like(embed, requires_grad=True)
    state_perturbed = eval_fn(embed + noise)
    loss = F.kl_div(F.log_softmax(state_perturbed, -1), F.softmax(state.detach(), -1), reduction="batchmean")
    noise_gradient, = torch.autograd.grad(loss, noise)
    return noise_gradient
smart(embed, model(embed))
""",
        ["unused .*`noise`", r"in graph .*`model\."],
        [r"cut .*state\.detach"],
    ),
    "attributions_of_frozen_features": (
        "meta-pytorch/captum#1493",
        """
class Wav2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_grad_mult = 0.0
        self.features, self.proj = nn.Conv1d(4, 6, 3), nn.Linear(6, 1)
    def forward(self, source):
        if self.feature_grad_mult > 0:
            features = self.features(source)
        else:
            with torch.no_grad():
                features = self.features(source)
        return {"out": self.proj(features.mean(-1))}
class Tuned(nn.Module):
    def __init__(self, pretrained):
        super().__init__()
        self.first, self.pretrained = nn.Conv1d(4, 4, 1), pretrained
    def forward(self, source): return torch.sigmoid(self.pretrained(self.first(source))["out"])
model = Tuned(Wav2Vec())
inputs = torch.randn(2, 4, 10, requires_grad=True)
grads = torch.autograd.grad(torch.unbind(model(inputs)[:, 0]), inputs)
""",
        [
            "unused .*`inputs`",
            r"cut .*features = self\.features\(source\)",
            "gradients were off",
            "off since .*no_grad",
        ],
        [],
    ),
    "q_values_in_a_list": (
        "pytorch/pytorch#34535",
        """
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters())
states, rewards = torch.randn(5, 4), torch.randn(5)
def values(batch):
    q = []
    for s in batch:
        q.append(policy(s).max())
    return torch.tensor(q)
loss = F.smooth_l1_loss(values(states), rewards)
optimizer.zero_grad()
loss.backward()
optimizer.step()
""",
        ["no graph `loss`", r"cut .*return torch\.tensor\(q\)"],
        ["frozen"],
    ),
    "gradient_in_a_test_step": (
        "Lightning-AI/pytorch-lightning#19910",
        """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
def test_step(x):
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        energy = net(x).sum()
        force = -torch.autograd.grad(energy, x)[0]
    return force
with torch.inference_mode():
    for batch in torch.randn(2, 5, 3):
        test_step(batch)
""",
        ["inference_mode"],
        [],
    ),
    "gradients_kept_by_a_hook": (
        "pytorch/pytorch#4661",
        """
embedding_gradient = []
emb, head = nn.Embedding(10, 4), nn.Linear(4, 2)
def hook_layers(module, grad_in, grad_out):
    embedding_gradient.append(grad_out[0])
emb.register_full_backward_hook(hook_layers)
for i in range(60):
    loss = F.cross_entropy(head(emb(torch.randint(10, (3, 5))).tanh().mean(1)), torch.tensor([0, 1, 0]))
    emb.zero_grad(); head.zero_grad()
    loss.backward(create_graph=True)
""",
        [r"`embedding_gradient`", r"grows at .*embedding_gradient\.append", r"iterations"],
        [r"\d{3} iterations"],
    ),
    "maml_over_tasks": (
        "HLTCHKUST/PAML#18",
        """
import copy
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
inner, meta = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())
weights = copy.deepcopy(model.state_dict())
batch_loss = 0
for task in range(3):
    x, y, xq, yq = torch.randn(5, 3), torch.randn(5, 1), torch.randn(5, 3), torch.randn(5, 1)
    inner.zero_grad()
    F.mse_loss(model(x), y).backward()
    inner.step()
    val = F.mse_loss(model(xq), yq)
    batch_loss += val
    model.load_state_dict(weights)
meta.zero_grad()
batch_loss.backward()
meta.step()
""",
        [r"saved .*model\.2\.weight`", "changed .*load_state_dict"],
        [],
    ),
    "differences_in_place": (
        "JDAI-CV/LIO#9",
        """
net = nn.Linear(4, 3)
target = torch.randn(6, 3)
out = net(torch.randn(6, 4))
diff = out - target
weight = diff.pow(2)
diff.abs_()
loss = (weight * diff).mean()
loss.backward()
""",
        ["saved .*diff`", r"changed .*diff\.abs_\(\)"],
        [],
    ),
    "dense_residuals": (
        "Jee-King/TSAN#3",
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(3, 3, 3, padding=1) for _ in range(2))
    def forward(self, x):
        out = x
        for conv in self.convs:
            out += conv(out).sigmoid()
        return out
head, block = nn.Conv1d(1, 3, 1), Block()
loss = block(head(torch.randn(2, 1, 8))).square().mean()
loss.backward()
""",
        ["saved .*ConvolutionBackward0 saved it", r"changed .*out \+= conv\(out\)"],
        [],
    ),
    "minimax_with_a_step_between": (
        "thuml/Anomaly-Transformer#1",
        """
model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(6, 4)
hidden = model[0](x)
output = model[2](hidden.relu())
rec_loss, assoc = F.mse_loss(output, x), hidden.square().mean()
loss1, loss2 = rec_loss - 3 * assoc, rec_loss + 3 * assoc
optimizer.zero_grad()
loss1.backward(retain_graph=True)
optimizer.step()
loss2.backward()
optimizer.step()
""",
        [r"saved .*model\.2\.weight`", r"changed .*optimizer\.step\(\)"],
        [],
    ),
    "temperature_first": (
        "watchernyu/REDQ#2",
        """
policy, log_alpha = nn.Linear(3, 2), torch.zeros(1, requires_grad=True)
policy_opt, alpha_opt = torch.optim.Adam(policy.parameters()), torch.optim.Adam([log_alpha])
for i in range(2):
    log_prob = policy(torch.randn(5, 3)).log_softmax(-1).mean(-1)
    policy_loss = (log_alpha.exp() * log_prob).mean()
    alpha_loss = -(log_alpha * (log_prob + 2).detach()).mean()
    policy_loss = policy_loss + (log_alpha * log_prob).mean()
    alpha_opt.zero_grad()
    alpha_loss.backward()
    alpha_opt.step()
    policy_opt.zero_grad()
    policy_loss.backward()
    policy_opt.step()
""",
        ["saved .*log_alpha`", r"changed .*alpha_opt\.step\(\)"],
        [],
    ),
    "scaled_by_its_gradient": (
        "BaiTheBest/SparseLLM#13",
        """
s, target = torch.randn(4, 6), torch.randn(4, 3)
for chunk in (slice(0, 3), slice(3, 6)):
    s_batch = s[:, chunk].clone().requires_grad_()
    loss_s = F.mse_loss(s_batch.relu(), target)
    loss_s.backward()
    s_batch -= 0.1 * s_batch.grad
    s_batch.grad.zero_()
    s[:, chunk] = s_batch.detach()
""",
        ["`s_batch`", r"s_batch -= 0\.1"],
        [],
    ),
    "knowledge_edited": (
        "Hunter-DDM/knowledge-neurons#14",
        """
bert = nn.Module(); bert.dense = nn.Linear(5, 4)
ori, tgt, pos = torch.randn(4), torch.randn(4), 2
bert.dense.weight[:, pos] -= ori * 0.5
bert.dense.weight[:, pos] += tgt * 0.5
""",
        [r"bert\.dense\.weight", "-= ori"],
        [],
    ),
    "cache_of_the_generation": (
        "unslothai/unsloth#2434",
        """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__(); self.cos = None
    def forward(self, x):
        if self.cos is None:
            self.cos = torch.arange(x.shape[-1]).cos()
        return x * self.cos
model = nn.Sequential(nn.Linear(3, 4), Rotary(), nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters())
with torch.inference_mode():
    model(torch.randn(2, 3))
loss = model(torch.randn(2, 3)).square().mean()
loss.backward()
""",
        ["cos`", r"return x \* self\.cos", "inference_mode"],
        [],
    ),
    "labels_of_the_true_weights": (
        "zhangyu2234/Deep-learning-by-hand",
        """
X = torch.randn(60, 2)
true_W, true_b = torch.randn((2, 1), requires_grad=True), torch.randn(1, requires_grad=True)
Y = torch.mm(X, true_W) + true_b
W, b = torch.normal(0, 0.01, size=(2, 1), requires_grad=True), torch.zeros(1, requires_grad=True)
def sgd(params, lr):
    with torch.no_grad():
        for p in params:
            p -= lr * p.grad
            p.grad.zero_()
for epoch in range(2):
    for i in range(0, 60, 20):
        x, y = X[i:i + 20], Y[i:i + 20]
        l = ((torch.relu(torch.mm(x, W) + b) - y) ** 2).mean()
        l.backward()
        sgd([W, b], 0.01)
""",
        ["`Y`", "=> made once: "],
        ["carried|previous step"],
    ),
    "states_of_batches_retained": (
        "blog.csdn windhawk_fly/143405685",
        """
lstm = nn.LSTM(4, 6, batch_first=True)
optimizer = torch.optim.Adam(lstm.parameters())
h0, c0 = torch.randn(1, 5, 6), torch.randn(1, 5, 6)
for batch in range(3):
    optimizer.zero_grad()
    output, (h0, c0) = lstm(torch.randn(5, 3, 4), (h0, c0))
    loss = F.mse_loss(output, torch.randn(5, 3, 6))
    loss.backward(retain_graph=True)
    optimizer.step()
""",
        ["`?h0`?", "c0", "=> carried over: "],
        [],
    ),
    "states_of_layers_in_place": (
        "pytorch docs, nn.RNN's equivalent (kuloverse.site)",
        """
rnn = nn.RNN(3, 4, 2)
params = dict(rnn.named_parameters())
def forward(x, hx):
    h_t_minus_1 = hx.clone()
    h_t = hx.clone()
    output = []
    for t in range(x.size(0)):
        for layer in range(2):
            input_t = x[t] if layer == 0 else h_t[layer - 1]
            w, r = params[f"weight_ih_l{layer}"], params[f"weight_hh_l{layer}"]
            h_t[layer] = torch.tanh(input_t @ w.T + h_t_minus_1[layer] @ r.T)
        output.append(h_t[-1].clone())
        h_t_minus_1 = h_t.clone()
    return torch.stack(output)
loss = forward(torch.randn(3, 2, 3), torch.zeros(2, 2, 4)).sum()
loss.backward()
""",
        [r"saved .*h_t\[layer\]`", r"changed .*h_t\[layer\] = torch\.tanh"],
        [],
    ),
    "latents_made_after_the_forward": (
        "showlab/BoxDiff#20",
        """
unet, store = nn.Linear(4, 3), {}
unet.register_forward_hook(lambda m, i, o: store.update(attn=o.softmax(-1)))
latents = torch.randn(1, 4)
for i in range(2):
    unet(latents)
    latents = latents.clone().detach().requires_grad_(True)
    loss = (1 - store["attn"][:, 0]).sum()
    grad_cond = torch.autograd.grad(loss.requires_grad_(True), [latents], retain_graph=True)[0]
    latents = latents - 0.1 * grad_cond
""",
        ["unused .*`latents`", r"in graph .*`unet\.", r"unused .*latents = latents\.clone\(\)\.detach\(\)"],
        [],
    ),
    "checkpoint_asked_by_grad": (
        "lucidrains/memory-efficient-attention-pytorch#3, haidog-yaqub/MeanFlow#4",
        """
from torch.utils.checkpoint import checkpoint
net, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
energy = checkpoint(net, x, use_reentrant=True).square().sum()
force = torch.autograd.grad(energy, x)[0]
""",
        ["=> checkpoint: ", r"read .*energy = checkpoint\("],
        [],
    ),
    "one_number_of_a_vector": (
        "cybertronai/autograd-hacks#8, ramprs/grad-cam#26",
        """
unet = nn.Conv2d(3, 2, 3, padding=1)
img = torch.randn(1, 3, 6, 6, requires_grad=True)
logit = unet(img)
score = logit[:, 1]
score.backward()
""",
        [r"`score`: it has shape \(1, 6, 6\)", r"score = logit\[:, 1\]"],
        [],
    ),
}


CHANGED = (
    "policy_after_q",
    "policy_in_functions",
    "mask_after_softmax",
    "maml_over_tasks",
    "differences_in_place",
    "dense_residuals",
    "minimax_with_a_step_between",
    "temperature_first",
    "states_of_batches_retained",
    "states_of_layers_in_place",
)
"""What is said of these names the tensor that was changed in place, or the line that changed it."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", marked(THREADS, CHANGES, CHANGED))
def test_a_program_after_a_thread_is_explained(name, tmp_path, capsys, process):
    _, text, said, unsaid = THREADS[name]
    path = tmp_path / "program.py"
    path.write_text(START + text, "utf-8")
    main(["explain", str(path)])
    words = " ".join(capsys.readouterr().err.split("hodiff: ", 1)[1].split())
    words = words.partition(" helps: ")[0]  # what helps is said of the class
    for each in said:
        assert re.search(each, words), words
    for each in unsaid:
        assert not re.search(each, words), words
