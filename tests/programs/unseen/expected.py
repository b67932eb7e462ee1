"""What must be said of each program here.

Variables and lines were written, and committed, before hodiff was run on any of them: any of each may be named. The
classes were then called by other names.
"""

from tests.programs.expectation import Expected

EXPECTED = {
    "language_model_states": Expected("carried over", ("states",), ("outputs, states = model(inputs, states)",)),
    "encoder_refines_its_latent": Expected("carried over", ("latent",), ("y_hat, latent = self.net(x_input, latent)",)),
    "memory_of_nodes": Expected("carried over", ("memory.memory",), ("self.memory[node_idxs, :] = values",)),
    "planner_every_few_frames": Expected(
        "carried over", ("hidden",), ("trajectory, hidden = model(frames[t], hidden)",)
    ),
    "convlstm_state_lists": Expected(
        "carried over", ("last_states",), ("output, last_states = convlstm(clip, last_states)",)
    ),
    "session_recommender": Expected("carried over", ("hidden",), ("logit, hidden = self.model(item, hidden)",)),
    "cross_batch_memory": Expected(
        "carried over", ("xbm.feats", "self.feats"), ("self.feats[self.ptr : self.ptr + q_size] = feats",)
    ),
    "transforms_remember": Expected("made once", ("_cached_x_y",), ("return (y - self.network.shift) * torch.exp(",)),
    "propagators_cached": Expected("made once", ("propagator",), ("return torch.matrix_exp(",)),
    "initial_condition_cached": Expected(
        "made once", ("ic._cache", "self._cache"), ("self._cache[key] = self.func(X)", "ic = IC(lambda x:")
    ),
    "flow_of_latents": Expected("made once", ("latents", "x_train"), ("latents = autoencoder.encoder(images)",)),
    "series_made_into_channels": Expected(
        "made once", ("training_seq", "self.ds"), ("training_seq = to_channels(series).tanh()",)
    ),
    "old_policy_kept_its_graph": Expected(
        "made once",
        ("old_logprobs", "advantages"),
        ("old_logprobs = torch.stack(memory.logprobs)", "advantages = rewards - "),
    ),
    "tour_advantage": Expected("shared part", ("b",), ("b = critic(cities)",)),
    "prediction_not_detached": Expected("shared part", ("predictions",), ("predictions = self.critic(",)),
    "style_map_losses": Expected(
        "shared part", ("stylecode", "fake_img"), ("stylecode = self.mapping(", "fake_img = self.generator(stylecode)")
    ),
    "diversity_penalty": Expected(
        "shared part", ("phiGFake",), ("predFakeG, phiGFake = self.netD(", "phi = self.features(x)")
    ),
    "hessian_from_training_logits": Expected("shared part", ("logits",), ("logits = model(text, image)",)),
    "estimator_trained_in_forward": Expected(
        "shared part", ("z_c", "z_d"), ("z_c, z_d = self.content(x).tanh(), self.domain(x).tanh()",)
    ),
    "edges_discriminator_steps": Expected("changed parameter", ("discriminator",), ("self.dis_optimizer.step()",)),
    "cycle_of_generators": Expected("changed parameter", ("D_A", "D_B"), ("self.optimizer_D.step()",)),
    "one_fake_many_steps": Expected("changed parameter", ("netG", "fake"), ("optimizerG.step()", "fake = netG(noise)")),
    "imitation_steps_twice": Expected("changed parameter", ("critic",), ("critic_optim.step()",)),
    "skills_update_order": Expected("changed parameter", ("critic",), ("opt.step()",)),
    "inpainting_losses_by_name": Expected("changed parameter", ("localD", "globalD"), ("trainer.optimizer_d.step()",)),
    "agents_of_a_network": Expected("changed parameter", ("q_network",), ("agent.optimizer.step()",)),
    "adversary_more_generator_steps": Expected(
        "changed parameter",
        ("self.G", "advgan.G", "perturbation", "adv_images"),
        ("self.optimizer_G.step()", "perturbation = self.G(x)"),
    ),
    "sharpness_second_step": Expected(
        "changed parameter",
        ("backbone",),
        ('optimizers["backbone"].first_step(zero_grad=True)', 'p.add_(self.state[p]["e_w"])'),
    ),
    "attention_on_the_same_memory": Expected("changed value", ("out", "x"), ("out *= self.attention(residual)",)),
    "pitch_thresholded": Expected("changed value", ("pitch",), ("pitch[periodicity < self.value] = 0.0",)),
    "weights_copied_in": Expected(
        "refused in place", ("cconv.weight", "conv.weight"), ("cconv.weight[:, :, :, :] = W[:, :, :, :]",)
    ),
    "sinusoidal_embeddings": Expected("refused in place", ("E",), ("E[:, 0::2] = theta[:, 0::2].sin()",)),
    "image_tower_kept_alive": Expected(
        "refused in place", ("inputs_embeds",), ("inputs_embeds += image_embeds.mean() * 0.0",)
    ),
    "heatmap_denormalised": Expected("refused in place", ("channel",), ("channel.mul_(std).add_(mean)",)),
    "kernels_in_a_grid": Expected("refused in place", ("img", "t"), ("img.clamp_(min=low, max=high)",)),
    "gru_layers_squeezed": Expected("refused in place", ("hx",), ("hx = [hx[idx].squeeze_(0) for idx",)),
    "natural_gradient_hooks": Expected("refused in place", ("",), ("output = model(torch.rand(2, 1, 5, 5))",)),
    "equilibrium_model_copied": Expected("copied", ("model.block.weight",), ("best = copy.deepcopy(model)",)),
    "depth_on_frozen_features": Expected(
        "inference tensor",
        ("x",),
        ("depth = self.decode_head(x)", "x = self.extract_feat(img)", "return self.backbone(img)"),
    ),
    "codebook_use_counted": Expected("discrete", ("indices", "loss"), ("indices = torch.argmax(Q, dim=-1)",)),
    "poly_loss_example": Expected(
        "nothing requires grad",
        ("logits", "loss"),
        ("logits = torch.rand([batch_size, num_classes])", "loss = criterion(logits, labels)"),
    ),
    "optimised_in_a_function": Expected("inside a Function", ("loss",), ("loss = torch.sum((x - y) ** 2)",)),
    "backward_by_autograd": Expected("inside a pass", ("outputs",), ("outputs = torch.tanh(inputs)",)),
    "gradient_within_a_hook": Expected("inside a pass", ("U",), ("U = V_grad.pow(2).sum()",)),
    "line_twice_differentiated": Expected(
        "zero derivative", ("first",), ("first = torch.autograd.grad(y, x, create_graph=True)[0]",)
    ),
    "hessian_of_plain_gradients": Expected("first gradient", ("gradsH",), ("loss.backward()", "param.grad + 0.0")),
    "frozen_embeddings_checkpointed": Expected(
        "checkpoint", ("loss", "output", "hidden_states"), ("hidden_states = checkpoint(layer_module",)
    ),
    "checkpoint_returns_a_dataclass": Expected("checkpoint", ("loss", "out"), ("out = checkpoint(self.block",)),
    "adapted_weights_left_out": Expected(
        "not used",
        ("params['features.weight']", 'params["features.weight"]', "features.weight"),
        ("grads = torch.autograd.grad(loss, params.values()", "inner_loss = F.cross_entropy(train_logit"),
    ),
    "edges_of_the_transform": Expected("not used", ("data['pos']",), ('data["pos"].requires_grad_()',)),
    "surrogates_at_the_end": Expected("shared part", ("advantage",), ("advantage = action_value - v",)),
    "activations_listed_in_model": Expected(
        "copied", ("model.edge_actscale",), ("self.edge_actscale.append(x.std(0))",)
    ),
    "latents_made_anew": Expected(
        "not used", ("latents",), ("latents = latents.clone().detach().requires_grad_(True)",)
    ),
    "critic_with_attention": Expected(
        "no second derivative", ("",), ("return F.scaled_dot_product_attention(q, k, v)",)
    ),
    "compiled_force_matching": Expected("no second derivative", ("",), ("energy = potential(positions)",)),
    "field_trained_by_its_slope": Expected(
        "Function differentiable once", ("_grid_encode", ""), ("_grid_encode.apply(xyz, self.embeddings)",)
    ),
    "saved_tensors_looked_at_twice": Expected(
        "recomputed otherwise",
        ("ctx.saved_tensors",),
        ("x, decay = ctx.saved_tensors", "if len(ctx.saved_tensors) == 0:"),
    ),
    "cache_grows_in_recomputation": Expected(
        "recomputed otherwise",
        ("",),
        ("hidden = checkpoint(layer, hidden, past_key_values", "torch.cat([self.key_cache[layer_idx], keys]"),
    ),
    "experts_rebalanced": Expected(
        "recomputed otherwise",
        ("",),
        ("loss = checkpoint(layer, torch.randn(12, 4)", "self.expert_bias = self.expert_bias + "),
    ),
    "graph_drawn_after_backward": Expected(
        "read after freeing",
        ("fn", "y", "val"),
        ("val = getattr(fn, attr)", "y.backward()", "drawn = len(make_dot(y).nodes)"),
    ),
    "vae_of_three_optimizers": Expected("changed parameter", ("G.decoder",), ("opt_dec.step()",)),
    "gates_biased_after_the_sigmoid": Expected("changed value", ("value",), ("value += self.ru_biases",)),
    "membranes_zeroed_in_place": Expected("carried over", ("v_mem",), ("self.v_mem = self.alpha * self.v_mem + step",)),
    "tasks_summed_twice": Expected("shared part", ("loss",), ("loss += loss_t",)),
    "mask_gradients_by_argmax": Expected("discrete", ("pred",), ("pred = pred.argmax(1)",)),
}
