"""The actor's loss and the critic's share the features; the critic has stepped when the actor's is differentiated.

After https://github.com/lweitkamp/option-critic-pytorch/issues/4
"""

import torch
from torch import nn


class OptionCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
        self.Q = nn.Linear(6, 2)
        self.terminations = nn.Linear(6, 2)

    def get_state(self, obs):
        return self.features(obs)


def critic_loss(model, state, reward):
    return (model.Q(state) - reward).pow(2).mean()


def actor_loss(model, state):
    return (model.terminations(state).sigmoid() * model.Q(state).detach()).mean()


torch.manual_seed(0)
option_critic = OptionCritic()
optim = torch.optim.SGD(option_critic.parameters(), lr=0.1)
for _ in range(3):
    state = option_critic.get_state(torch.randn(5, 4))
    loss = critic_loss(option_critic, state, torch.randn(5, 2))
    optim.zero_grad()
    loss.backward()
    optim.step()
    loss = actor_loss(option_critic, state)
    optim.zero_grad()
    loss.backward()
    optim.step()
