"""An actor-critic with a replay memory stores the log probabilities of its actions, and samples them again.

After https://github.com/philtabor/Youtube-Code-Repository/issues/19
"""

import random

import torch
from torch import nn


class ActorCriticNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 8)
        self.pi, self.v = nn.Linear(8, 2), nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def forward(self, state):
        x = self.fc1(state).relu()
        return self.pi(x), self.v(x)


class Agent:
    def __init__(self):
        self.gamma = 0.99
        self.actor_critic = ActorCriticNetwork()
        self.log_prob = None
        self.memory = []

    def choose_action(self, observation):
        probabilities, _ = self.actor_critic(torch.tensor([observation]))
        probabilities = probabilities.softmax(1)
        action_probs = torch.distributions.Categorical(probabilities)
        action = action_probs.sample()
        self.log_prob = action_probs.log_prob(action)
        return action.item()

    def remember(self, state, reward, state_, done):
        self.memory.append((state, reward, state_, done, self.log_prob))

    def learn(self):
        if len(self.memory) < 4:
            return
        batch = random.sample(self.memory, 4)
        state = torch.tensor([m[0] for m in batch])
        reward = torch.tensor([m[1] for m in batch])
        state_ = torch.tensor([m[2] for m in batch])
        done = torch.tensor([float(m[3]) for m in batch])
        log_probs = torch.cat([m[4] for m in batch])
        self.actor_critic.optimizer.zero_grad()
        _, critic_value = self.actor_critic(state)
        _, critic_value_ = self.actor_critic(state_)
        delta = reward + self.gamma * critic_value_.view(-1) * (1 - done) - critic_value.view(-1)
        actor_loss = -(log_probs * delta).mean()
        critic_loss = (delta**2).mean()
        (actor_loss + critic_loss).backward()
        self.actor_critic.optimizer.step()


torch.manual_seed(0)
random.seed(0)
agent = Agent()
observation = [0.1, 0.2, 0.3]
for step in range(8):
    action = agent.choose_action(observation)
    observation_ = [random.random() for _ in range(3)]
    agent.remember(observation, float(action), observation_, step == 7)
    agent.learn()
    observation = observation_
