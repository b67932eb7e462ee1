"""What must be said of each program here, how it is written rightly, and each printed fix done as it says."""

from tests.programs.expectation import AS_PRINTED, KEPT, Expected, Patch, swap


def report(
    cause: str, variable: str, line: str, right: Patch, fixes: tuple[Patch, ...] = (), answers: tuple[Patch, ...] = ()
) -> Expected:
    """One variable, one line, and one right program."""
    return Expected(cause, (variable,), (line,) if line else (), (right,), fixes, answers)


def after_step(step: str, lines: str) -> Patch:
    """Something computed again behind a step."""
    return ((step, f"{step}\n{lines}"),)


_KERNEL = (
    ("x1 / self.length_scales", "x1 / torch.exp(self.log_length)"),
    ("x2 / self.length_scales", "x2 / torch.exp(self.log_length)"),
    ("return self.signal_variance", "return torch.exp(self.log_signal)"),
)
_REPLAYED = (
    ("        self.log_prob = action_probs.log_prob(action)\n", "        self.log_prob = action\n"),
    (
        "        _, critic_value = self.actor_critic(state)\n",
        "        logits, critic_value = self.actor_critic(state)\n"
        "        log_probs = torch.distributions.Categorical(logits.softmax(1)).log_prob(log_probs)\n",
    ),
)
_FROZEN = (
    (
        "        gradients =",
        "        trained = {n: p for n, p in self.params.items() if p.requires_grad}\n        gradients =",
    ),
    ("loss, list(self.params.values())", "loss, list(trained.values())"),
    ("maml_update(self.params, self.lr, gradients)", "{**self.params, **maml_update(trained, self.lr, gradients)}"),
)
_COPIED = (
    ("torch.tensor(pred_x.softmax(-1))", "pred_x.softmax(-1)"),
    ("torch.tensor(pred_y.softmax(-1))", "pred_y.softmax(-1)"),
)
_DETACH_H = swap("    loss.backward()\n", "    loss.backward()\n    h_state = h_state.detach()\n")
_LSTM = (("self.lstm(x, self.hidden)", "self.lstm(x, tuple(h.detach() for h in self.hidden))"),)
_DECODER = swap(
    "        for j in range(",
    "        def cut(state):\n            hidden = tuple(h.detach() for h in state.hidden)\n"
    "            return DecoderState(hidden, state.input_feed.detach())\n\n        for j in range(",
) + swap(
    "            outputs = self.model(batch",
    "            dec_state = cut(dec_state)\n            outputs = self.model(batch",
)
_NEURONS = swap(
    "        optimizer.zero_grad()\n        outputs",
    "        for m in model_train.modules():\n"
    "            if isinstance(m, Neuron) and isinstance(m.v, torch.Tensor):\n                m.v = m.v.detach()\n"
    "        optimizer.zero_grad()\n        outputs",
)
_SPIKING = swap(
    "    spk_rec = forward_pass",
    "    for m in net:\n        if isinstance(m, Leaky):\n            m.mem = m.mem.detach()\n    spk_rec = forward_pass",
)
_GAN = after_step("    opt_D.step()", "    G_loss = torch.mean(torch.log(1.0 - D(G_paintings)))")
_FACTOR = swap(
    "        self.optimizer_d.zero_grad()\n",
    "        _, latent_sample = model(data)\n        d_z = self.discriminator(latent_sample)\n"
    "        d_z_perm = self.discriminator(latent_sample.detach().flip(0))\n"
    "        d_tc_loss = nn.functional.cross_entropy(d_z, zeros) + nn.functional.cross_entropy(d_z_perm, ones)\n"
    "        self.optimizer_d.zero_grad()\n",
)
_ADJACENCY = (
    ("self.gconv(self.adp @ x)", "self.gconv(torch.softmax(torch.relu(self.nodevec1 @ self.nodevec2), dim=1) @ x)"),
)
_STYLE = swap("gram(sf.features) for sf in sfs]", "gram(sf.features).detach() for sf in sfs]")
_NO_GRAD = swap(
    "            p.add_(p.grad, alpha=-lr)",
    "            with torch.no_grad():\n                p.add_(p.grad, alpha=-lr)",
)
_CODES = swap(
    "            s_batch -= s_learning_rate * s_batch.grad",
    "            with torch.no_grad():\n                s_batch -= s_learning_rate * s_batch.grad",
)
_EDIT = tuple(
    (
        f"        layers[layer].dense.weight[:, pos] {sign}",
        f"        with torch.no_grad():\n            layers[layer].dense.weight[:, pos] {sign}",
    )
    for sign in ("-=", "+=")
)
_TWICE = swap(
    "        critic1_loss.backward()\n        critic2_loss.backward()",
    "        (critic1_loss + critic2_loss).backward()",
)
_CELL = swap(
    "    W.grad = None\n",
    "    W.grad = None\n    prob = (xenc @ W).softmax(1)\n    loss = -prob[torch.arange(5), ys].log().mean()\n",
)
_CHECKPOINT = swap("use_reentrant=True", "use_reentrant=False")
_CDIST = swap("torch.cdist(a, b)", "(a[:, None] - b).square().sum(-1).sqrt()")
_MAML = swap(
    "loss, learner.parameters(), create_graph=True",
    "loss, [*learner.body.parameters(), *learner.cls.parameters()], create_graph=True",
)
_ENCODED = swap(
    "    encoded_positions = position_embedding(torch.arange(5))\n    for patches, labels in batches:\n",
    "    for patches, labels in batches:\n        encoded_positions = position_embedding(torch.arange(5))\n",
)

EXPECTED = {
    # --- state that one step hands to the next ---
    "lstm_state_of_windows": report(
        "carried", "h_state", "r_out, h_state = self.rnn(x, h_state)", _DETACH_H, (AS_PRINTED,)
    ),
    "memory_state_retained": report(
        "carried",
        "next_state",
        "memory = memory * (1 - weights)",
        swap("        state = next_state\n", "        state = tuple(part.detach() for part in next_state)\n"),
        (AS_PRINTED,),
    ),
    "hidden_state_of_the_architect": report(
        "carried",
        "hidden",
        "hidden = probs[0] * s.tanh()",
        swap("        return hidden_next\n\n\ndef", "        return hidden_next.detach()\n\n\ndef"),
    ),
    "neurons_trained_online": report(
        "carried",
        "model[1].v",
        "self.v = (1.0 - spike) * self.v",
        swap(
            "        if online:\n",
            "        for neuron in (model[1], model[3]):\n            neuron.v = neuron.v.detach()\n        if online:\n",
        ),
        (AS_PRINTED,),
    ),
    "lstm_hidden_in_module": report("carried", "model.hidden", "lstm_out, self.hidden = ", _LSTM, (AS_PRINTED,)),
    "decoder_state_object": report("carried", "dec_state.hidden", "hidden = self.cell(", _DECODER, (AS_PRINTED,)),
    "spiking_membranes": report("carried", "net[3].mem", "self.mem = self.mem - spike", _SPIKING, (AS_PRINTED,)),
    "neurons_of_a_backbone": report("carried", "neuron.v", "self.v = (1.0 - spike) * self.v", _NEURONS, (AS_PRINTED,)),
    "graph_memory": report(
        "carried",
        "model.memory.memory_container",
        "self.memory.set_node_memory(target",
        swap(
            "self.memory_container[node]\n\n",
            "self.memory_container[node]\n\n    def cut(self):\n        for node, value in list(self.memory_container.items()):\n            self.memory_container[node] = value.detach()\n\n",
        )
        + swap("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    model.memory.cut()\n"),
        (AS_PRINTED,),
    ),
    "evolving_weight": report(
        "carried",
        "model.recurrent.weight",
        "_, self.weight = self.recurrent_layer",
        swap(
            "    loss = 0\n",
            "    loss = 0\n    if epoch:\n        model.recurrent.weight = model.recurrent.weight.data\n",
        ),
        (AS_PRINTED,),
    ),
    "key_value_cache": report(
        "carried",
        "model.attention.cache_",
        "self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv",
        swap("self.cache_k.to(xq)", "self.cache_k.to(xq).detach()")
        + swap("self.cache_v.to(xq)", "self.cache_v.to(xq).detach()"),
        (AS_PRINTED,),
    ),
    "neuron_state_tuple": report(
        "carried",
        "state.",
        "v = 0.9 * state.v + 0.1 * i",
        swap(
            "i = 0.8 * state.i +", "state = LIFState(state.v.detach(), state.i.detach())\n        i = 0.8 * state.i +"
        ),
        (AS_PRINTED,),
    ),
    # --- what an object keeps ---
    "rotary_frequencies": report(
        "cached",
        "model.rotary.cached_freqs",
        'freqs = torch.einsum("i,j->ij", t, self.freqs)',
        swap("        self.cached_freqs = freqs\n", ""),
        (AS_PRINTED,),
    ),
    "cached_lattice_sum": report(
        "cached",
        "calculator._cached_filter",
        "self._cached_filter = torch.exp(",
        swap("if self._cached_filter is None or", "if True or"),
        (AS_PRINTED,),
    ),
    "parametrizations_cached": report(
        "cached parameters",
        "parametrize.cached()",
        "return torch.matrix_exp(",
        swap("with parametrize.cached():\n    for step in range(3):\n", "if True:\n    for step in range(3):\n"),
        (
            swap(
                "with parametrize.cached():\n    for step in range(3):\n        training_step(",
                "for step in range(3):\n    with parametrize.cached():\n        training_step(",
            ),
        ),
    ),
    "flow_keeps_its_inverse": report(
        "cached", "flow._cached_x_y[0]", "return (y - self.shift) *", swap("cache_size=1", "cache_size=0")
    ),
    "memoised_cholesky": report(
        "cached",
        "strategy._memoize_cache['cholesky_factor']",
        "torch.linalg.cholesky(",
        swap('    @cached("cholesky_factor")\n', ""),
        (AS_PRINTED,),
    ),
    "prediction_caches": report(
        "cached",
        "model.mean_cache",
        "self.mean_cache = torch.linalg.solve",
        swap("if self.mean_cache is None:", "if True:"),
        (AS_PRINTED,),
    ),
    # --- computed once ---
    "adjacency_made_in_init": report(
        "hoisted", "self.model.adp", "self.adp = torch.softmax(", _ADJACENCY, (_ADJACENCY,)
    ),
    "positions_encoded_once": report(
        "hoisted", "encoded_positions", "encoded_positions = position_embedding(", _ENCODED, (_ENCODED,)
    ),
    "mappo_advantages": report(
        "hoisted",
        "advantages",
        "advantages = rewards - old_values",
        swap("rewards - old_values", "(rewards - old_values).detach()"),
        answers=(swap("advantages = rewards - old_values", "advantages = (rewards - old_values).detach()"),),
    ),
    "style_features_by_hooks": report(
        "hoisted", "targ_styles[1]", "return x.T @ x / x.numel()", _STYLE, answers=(_STYLE,)
    ),
    "reinforce_twice_over_an_episode": report(
        "hoisted",
        "policy.saved_log_probs[0]",
        "policy.saved_log_probs.append(",
        swap("policy.saved_log_probs.append(m.log_prob(action))", "policy.saved_log_probs.append((state, action))")
        + swap(
            "-log_prob * reward for log_prob, reward",
            "-torch.distributions.Categorical(policy(s)).log_prob(a) * reward for (s, a), reward",
        ),
    ),
    "update_cell_run_again": report("same loss twice", "loss", "loss = -prob[", _CELL, (_CELL,)),
    # --- two losses ---
    "two_critics_share_a_target": report(
        "two losses",
        "embedded",
        "embedded = self.encoder(obss).tanh()",
        _TWICE,
        (_TWICE, KEPT, swap("critic1_loss.backward()", "critic1_loss.backward(retain_graph=True)")),
    ),
    "penalty_with_attached_fakes": report(
        "two losses",
        "self.fake_B",
        "self.fake_B = self.netG(real_A)",
        swap("self.real_B, self.fake_B)", "self.real_B, self.fake_B.detach())"),
        answers=(
            swap(
                "cal_gradient_penalty(self.netD, self.real_B, self.fake_B)",
                "cal_gradient_penalty(self.netD, self.real_B, self.fake_B.detach())",
            ),
        ),
    ),
    "td3_loss_dict": report(
        "two losses",
        "joint",
        "joint = torch.cat([obs, action], 1)",
        swap("(self.qvalue(joint) - reward)", "(self.qvalue(torch.cat([obs, action.detach()], 1)) - reward)"),
        answers=(swap("(self.qvalue(joint) - reward)", "(self.qvalue(joint.detach()) - reward)"),),
    ),
    "option_critic": report(
        "two losses",
        "state",
        "return self.features(obs)",
        swap(
            "    state = option_critic.get_state(torch.randn(5, 4))",
            "    obs = torch.randn(5, 4)\n    state = option_critic.get_state(obs)",
        )
        + swap("    loss = actor_loss(", "    state = option_critic.get_state(obs)\n    loss = actor_loss("),
    ),
    "fakes_in_two_functions": report(
        "two losses",
        "sr",
        "sr = generator(lr).tanh()",
        swap("discriminator(sr).mean() -", "discriminator(sr.detach()).mean() -"),
        answers=(swap("discriminator(sr).mean() -", "discriminator(sr.detach()).mean() -"),),
    ),
    # --- changed in place ---
    "gan_discriminator_steps_first": report("changed in place", "D.2.weight", "opt_D.step()", _GAN, (_GAN,)),
    "factor_vae": report("changed in place", "model.encoder.2.weight", "optimizer.step()", _FACTOR, (_FACTOR,)),
    "maddpg_critic_first": report(
        "changed in place",
        "self.critic_network.2.weight",
        "self.critic_optim.step()",
        swap("        actor_loss = -self.q(o, self.actor_network(o)).mean()\n", "")
        + swap(
            "        self.actor_optim.zero_grad()\n",
            "        actor_loss = -self.q(o, self.actor_network(o)).mean()\n        self.actor_optim.zero_grad()\n",
        ),
        (
            after_step(
                "        self.critic_optim.step()", "        actor_loss = -self.q(o, self.actor_network(o)).mean()"
            ),
        ),
    ),
    "sac_policy_after_critics": report(
        "changed in place",
        "self.qf1.2.weight",
        "self.qf1_optimizer.step()",
        swap(
            "        self.policy_optimizer.zero_grad()\n",
            "        new_obs_actions = torch.cat([obs, self.policy(obs).tanh()], 1)\n        policy_loss = -torch.min(self.qf1(new_obs_actions), self.qf2(new_obs_actions)).mean()\n        self.policy_optimizer.zero_grad()\n",
        ),
        (
            after_step(
                "        self.qf2_optimizer.step()",
                "        q_new_actions = torch.min(self.qf1(new_obs_actions), self.qf2(new_obs_actions))\n        policy_loss = -q_new_actions.mean()",
            ),
        ),
    ),
    "residual_added_in_place": report(
        "changed in place", "out", "out += residual", swap("out += residual", "out = out + residual"), (AS_PRINTED,)
    ),
    "gate_then_inplace_relu": report(
        "changed in place",
        "x",
        "x = self.act(x)",
        swap("x = self.act(x)", "x = torch.relu(x)"),
        (swap("inplace=True", "inplace=False"),),
    ),
    # --- refused in the forward ---
    "update_by_hand": report("refused in place", "p", "p.add_(", _NO_GRAD, (_NO_GRAD,)),
    "sparse_codes_descend": report("refused in place", "s_batch", "s_batch -= ", _CODES, (_CODES,)),
    "neurons_edited": report("refused in place", "layers[layer].dense.weight[:, pos]", "-= original", _EDIT, (_EDIT,)),
    "fusion_weights_rectified": report(
        "refused in place",
        "",
        "weight = self.weight_relu(self.weight)",
        swap("self.weight_relu(self.weight)", "self.weight.relu()"),
        (swap("inplace=True", "inplace=False"),),
    ),
    "hooks_and_inplace_relu": report(
        "hook",
        "",
        "out = mod(torch.rand(1, 3, 4, 4))",
        swap(", nn.ReLU(inplace=True))", ", nn.ReLU())"),
        (swap("inplace=True", "inplace=False"),),
    ),
    "channels_normalised": report(
        "refused in place",
        "t",
        "t.sub_(m).div_(s)",
        swap(
            "            t.sub_(m).div_(s)\n        return tensor",
            "            pass\n        return (tensor - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]",
        ),
    ),
    "model_copied_after_forward": report(
        "copied",
        "model.exp",
        "ema = deepcopy(model)",
        swap(
            "        self.exp = self.con2(self.con1(x))\n        return self.exp",
            "        return self.con2(self.con1(x))",
        ),
    ),
    "rollout_under_inference_mode": report(
        "inference tensor",
        "inputs",
        "logps = self.model(inputs)",
        swap("inference_mode", "no_grad"),
        answers=(swap("inference_mode", "no_grad"),),
    ),
    # --- no graph, not in the graph ---
    "coordinates_by_argmax": report(
        "discrete",
        "loss",
        "torch.argmax(output_coor_x, axis=1)",
        swap(
            "torch.argmax(output_coor_x, axis=1), torch.argmax(output_coor_y, axis=1)",
            "output_coor_x.softmax(1) @ torch.arange(6.0), output_coor_y.softmax(1) @ torch.arange(6.0)",
        ),
        (
            swap(
                "torch.argmax(output_coor_x, axis=1), torch.argmax(output_coor_y, axis=1)",
                "(output_coor_x.softmax(1) * torch.arange(6.0)).sum(1), (output_coor_y.softmax(1) * torch.arange(6.0)).sum(1)",
            ),
        ),
    ),
    "losses_in_a_tensor": report(
        "made a constant",
        "loss",
        "balance_loss = torch.tensor(loss_list)",
        swap("balance_loss = torch.tensor(loss_list)", "balance_loss = sum(loss_list) / len(loss_list)"),
        (swap("torch.tensor(loss_list)", "torch.stack(loss_list)"),),
    ),
    "validation_step_trained_on": report(
        "no_grad",
        "losses['loss']",
        "outputs = self.model(inputs)",
        swap("losses = self.val(inputs)", "losses = self.process_batch(inputs)[1]"),
        (
            swap(
                "        with torch.no_grad():\n            outputs, losses",
                "        if True:\n            outputs, losses",
            ),
        ),
    ),
    "reentrant_checkpoint": report(
        "checkpoint",
        "loss",
        "x = checkpoint(r, x, use_reentrant=True)",
        swap("checkpoint(r, x, use_reentrant=True)", "r(x)"),
        (_CHECKPOINT,),
    ),
    "dice_by_numpy": report(
        "detached",
        "loss",
        ".detach().numpy())",
        swap("np.sum((probas * true).detach().numpy())", "(probas * true).sum()")
        + swap("np.sum((probas + true).detach().numpy())", "(probas + true).sum()"),
    ),
    "maml_with_an_unused_head": report("not used", "learner.regression_head.weight", "", _MAML, (_MAML,)),
    # --- derivatives that are missing ---
    "distances_twice": report(
        "no second derivative",
        "",
        "return torch.cdist(a, b)",
        _CDIST,
        (swap("torch.cdist(a, b)", 'torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist")'),),
    ),
    "compiled_energy": report(
        "no second derivative",
        "",
        "y = model(positions)",
        swap("y = model(positions)", "y = energy(positions)"),
        (swap('torch.compile(energy, backend="aot_eager")', "energy"),),
    ),
    "encoding_differentiable_once": report(
        "no second derivative",
        "",
        "return self.network(encoded).square()",
        swap("EncodingFunction.apply(x, self.table)", "(x @ self.table).sin()"),
    ),
    "checkpoint_under_autocast": report(
        "recomputed", "", "", swap("        if self.calls > 1:\n            x = x[:1]\n", "")
    ),
    "dehazing_losses_together": report(
        "changed in place",
        "self.gen.net.2.weight, self.gen.net.2.bias and 2 more still holds what",
        "self.dis_optimizer.step()",
        swap(
            "        dis_fake = self.disc(outputs)\n",
            "        dis_fake = self.disc(outputs.detach())\n",
        )
        + swap(
            "        gen_gan_loss =",
            "        return dis_loss\n\n    def of_generator(self, haze, clear):\n"
            "        outputs = self.gen(haze)\n        dis_fake = self.disc(outputs)\n        gen_gan_loss =",
        )
        + swap(
            "self.l1(outputs, dehaze_images)\n        return gen_loss, dis_loss",
            "self.l1(outputs, clear)\n        return gen_loss",
        )
        + swap("def backward(self, gen_loss, dis_loss):", "def backward(self, dis_loss, haze, clear):")
        + swap("        gen_loss.backward()", "        self.of_generator(haze, clear).backward()")
        + swap("gen_loss, dis_loss = net.process(haze, clear)", "dis_loss = net.process(haze, clear)")
        + swap("net.backward(gen_loss, dis_loss)", "net.backward(dis_loss, haze, clear)"),
        (
            swap("def backward(self, gen_loss, dis_loss):", "def backward(self, dis_loss, haze, clear):")
            + swap("net.backward(gen_loss, dis_loss)", "net.backward(dis_loss, haze, clear)")
            + swap(
                "        gen_loss.backward()",
                "        self.gen_optimizer.zero_grad()\n        outputs = self.gen(haze)\n"
                "        dis_fake = self.disc(outputs)\n"
                "        gen_loss = self.bce(dis_fake, torch.ones_like(dis_fake)) * 0.7 + self.l1(outputs, clear)\n"
                "        gen_loss.backward()",
            ),
        ),
    ),
    "kernel_exponentials_once": report(
        "hoisted",
        "`self.kernel.length_scales`, as at",
        "self.signal_variance = torch.exp(self.log_signal)",
        _KERNEL,
        (_KERNEL,),
    ),
    "log_probs_replayed": report(
        "stored", "`self.memory`", "self.log_prob = action_probs.log_prob(action)", _REPLAYED, answers=(_REPLAYED,)
    ),
    "adapted_with_frozen_weights": report("no graph", "self.params['model.0.haar_weights']", "", _FROZEN, (_FROZEN,)),
    "environment_trained_in_evaluation": report(
        "no_grad",
        "@torch.no_grad()",
        "output = self.model(data)",
        swap("    @torch.no_grad()\n", ""),
        (
            swap(
                "        output = self.model(data)\n        loss = self.loss_function(output, target)\n"
                "        self.model.zero_grad()\n        loss.mean().backward()\n",
                "        with torch.enable_grad():\n            output = self.model(data)\n"
                "            loss = self.loss_function(output, target)\n"
                "            self.model.zero_grad()\n            loss.mean().backward()\n",
            ),
        ),
    ),
    "sampled_logits_data": report(
        "detached", "`loss`", "logits = torch.stack(logits, 1).data", swap("1).data", "1)"), (swap("1).data", "1)"),)
    ),
    "predictions_copied": report("made a constant", "`loss`", "pre_y1 = torch.tensor(", _COPIED, (_COPIED,)),
    "texts_embedded_by_the_dataset": report(
        "hoisted",
        "dataset.tensor_frame.feat['text']",
        "return self.embedding(idx)",
        swap("return self.embedding(idx)", "return self.embedding(idx).detach()"),
        answers=(swap("return self.embedding(idx)", "return self.embedding(idx).detach()"),),
    ),
}
