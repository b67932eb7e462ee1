"""Each agent of a network steps in turn; the others' losses, computed before, look through its value function.

After https://github.com/FazelYU/Adaptive-Navigation/issues/41
"""

import torch
from torch import nn


class Agent:
    def __init__(self):
        self.q_network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.q_network.parameters(), lr=0.1)


class Navigation:
    def __init__(self, n):
        self.agents = [Agent() for _ in range(n)]

    def compute_loss(self, i, state, reward):
        neighbour = self.agents[(i + 1) % len(self.agents)]
        value = self.agents[i].q_network(state)
        following = neighbour.q_network(state.roll(1, 0))
        return (value - reward - 0.9 * following).square().mean()

    def learn(self, state, reward):
        losses = [self.compute_loss(i, state, reward) for i in range(len(self.agents))]
        for agent in self.agents:
            agent.optimizer.zero_grad()
        for agent, loss in zip(self.agents, losses):
            loss.backward()
            agent.optimizer.step()


torch.manual_seed(0)
navigation = Navigation(3)
for _ in range(2):
    navigation.learn(torch.randn(4, 3), torch.randn(4, 1))
