"""The states of a ConvLSTM, a list with a list for each layer, are handed to the next clip of the video.

After https://github.com/ndrplz/ConvLSTM_pytorch/issues/21
"""

import torch
from torch import nn


class ConvLSTMCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.conv = nn.Conv2d(inputs + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x, state):
        h_cur, c_cur = state
        i, f, o, g = self.conv(torch.cat([x, h_cur], 1)).chunk(4, 1)
        c_next = f.sigmoid() * c_cur + i.sigmoid() * g.tanh()
        h_next = o.sigmoid() * c_next.tanh()
        return h_next, c_next


class ConvLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell_list = nn.ModuleList([ConvLSTMCell(1, 2), ConvLSTMCell(2, 2)])

    def init_hidden(self, batch):
        return [[torch.zeros(batch, 2, 4, 4), torch.zeros(batch, 2, 4, 4)] for _ in self.cell_list]

    def forward(self, clip, hidden_state=None):
        if hidden_state is None:
            hidden_state = self.init_hidden(clip.size(0))
        last_state_list = []
        cur_input = clip
        for cell, (h, c) in zip(self.cell_list, hidden_state):
            output_inner = []
            for t in range(clip.size(1)):
                h, c = cell(cur_input[:, t], [h, c])
                output_inner.append(h)
            cur_input = torch.stack(output_inner, dim=1)
            last_state_list.append([h, c])
        return cur_input, last_state_list


torch.manual_seed(0)
convlstm = ConvLSTM()
optimizer = torch.optim.SGD(convlstm.parameters(), lr=0.1)
last_states = None
for clip in torch.randn(3, 2, 3, 1, 4, 4):
    output, last_states = convlstm(clip, last_states)
    loss = (output.mean(2) - clip.mean(2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
