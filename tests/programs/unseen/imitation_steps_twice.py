"""One loss of actor and critic is differentiated once for each of their optimisers.

After https://github.com/reinforcement-learning-kr/lets-do-irl/issues/9
"""

import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.fc2(self.fc1(x).tanh())


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.fc3(self.fc2(self.fc1(x).tanh()).tanh())


def train_actor_critic(actor, critic, memory, actor_optim, critic_optim):
    states, actions, returns, advantages = memory
    for _ in range(2):
        values = critic(states)
        critic_loss = nn.functional.mse_loss(values, returns)
        log_probs = -(actor(states) - actions).square().sum(1, keepdim=True)
        actor_loss = -(log_probs * advantages).mean()
        loss = actor_loss + 0.5 * critic_loss

        critic_optim.zero_grad()
        loss.backward(retain_graph=True)
        critic_optim.step()

        actor_optim.zero_grad()
        loss.backward()
        actor_optim.step()


torch.manual_seed(0)
actor, critic = Actor(), Critic()
actor_optim = torch.optim.SGD(actor.parameters(), lr=0.1)
critic_optim = torch.optim.SGD(critic.parameters(), lr=0.1)
memory = (torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 1), torch.randn(5, 1))
train_actor_critic(actor, critic, memory, actor_optim, critic_optim)
