"""The advantage of a tour still carries the critic's graph when the policy's loss is differentiated.

After https://github.com/jingw2/neural-combinatorial-optimization-rl/issues/1
"""

import torch
from torch import nn


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(2, 1)

    def forward(self, cities):
        dist = torch.distributions.Categorical(logits=self.score(cities).squeeze(-1))
        first = dist.sample()
        return first, dist.log_prob(first)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, cities):
        return self.net(cities.flatten(1))


def tour_length(cities, first):
    start = cities[torch.arange(len(cities)), first]
    return (cities - start[:, None]).norm(dim=-1).sum(1)


def train_step(pointer, critic, actor_optim, critic_optim, cities):
    first, log_prob = pointer(cities)
    L = tour_length(cities, first)
    b = critic(cities)
    advantage = L - b.view(-1)
    actor_loss = (advantage * log_prob).mean()
    actor_optim.zero_grad()
    actor_loss.backward()
    actor_optim.step()
    critic_loss = nn.functional.mse_loss(b.view(-1), L)
    critic_optim.zero_grad()
    critic_loss.backward()
    critic_optim.step()


torch.manual_seed(0)
pointer, critic = Pointer(), Critic()
actor_optim = torch.optim.SGD(pointer.parameters(), lr=0.1)
critic_optim = torch.optim.SGD(critic.parameters(), lr=0.01)
for _ in range(2):
    train_step(pointer, critic, actor_optim, critic_optim, torch.rand(4, 5, 2))
