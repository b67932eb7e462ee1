"""What must be said of each program here: the class of the failure, a variable, and a line."""

from tests.programs.expectation import Expected

EXPECTED = {
    "lstm_state_of_windows": Expected("carried over", ("h_state",), ("r_out, h_state = self.rnn(x, h_state)",)),
    "memory_state_retained": Expected("carried over", ("next_state",), ("memory = memory * (1 - weights)",)),
    "hidden_state_of_the_architect": Expected("carried over", ("hidden",), ("hidden = probs[0] * s.tanh()",)),
    "neurons_trained_online": Expected("carried over", ("model[1].v",), ("self.v = (1.0 - spike) * self.v",)),
    "lstm_hidden_in_module": Expected("carried over", ("model.hidden",), ("lstm_out, self.hidden = ",)),
    "decoder_state_object": Expected("carried over", ("dec_state.hidden",), ("hidden = self.cell(",)),
    "spiking_membranes": Expected("carried over", ("net[3].mem",), ("self.mem = self.mem - spike",)),
    "neurons_of_a_backbone": Expected("carried over", ("neuron.v",), ("self.v = (1.0 - spike) * self.v",)),
    "graph_memory": Expected(
        "carried over", ("model.memory.memory_container",), ("self.memory.set_node_memory(target",)
    ),
    "evolving_weight": Expected(
        "carried over", ("model.recurrent.weight",), ("_, self.weight = self.recurrent_layer",)
    ),
    "key_value_cache": Expected(
        "carried over", ("model.attention.cache_",), ("self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv",)
    ),
    "neuron_state_tuple": Expected("carried over", ("state.",), ("v = 0.9 * state.v + 0.1 * i",)),
    "rotary_frequencies": Expected(
        "made once", ("model.rotary.cached_freqs",), ('freqs = torch.einsum("i,j->ij", t, self.freqs)',)
    ),
    "cached_lattice_sum": Expected("made once", ("calculator._cached_filter",), ("self._cached_filter = torch.exp(",)),
    "parametrizations_cached": Expected("made once", ("a value without a name",), ("return torch.matrix_exp(",)),
    "flow_keeps_its_inverse": Expected("made once", ("flow._cached_x_y[0]",), ("return (y - self.shift) *",)),
    "memoised_cholesky": Expected(
        "made once", ("strategy._memoize_cache['cholesky_factor']",), ("torch.linalg.cholesky(",)
    ),
    "prediction_caches": Expected("made once", ("model.mean_cache",), ("self.mean_cache = torch.linalg.solve",)),
    "adjacency_made_in_init": Expected("made once", ("self.model.adp",), ("self.adp = torch.softmax(",)),
    "positions_encoded_once": Expected(
        "made once", ("encoded_positions",), ("encoded_positions = position_embedding(",)
    ),
    "mappo_advantages": Expected("made once", ("advantages",), ("advantages = rewards - old_values",)),
    "style_features_by_hooks": Expected("made once", ("targ_styles[1]",), ("return x.T @ x / x.numel()",)),
    "reinforce_twice_over_an_episode": Expected(
        "made once", ("policy.saved_log_probs[0]",), ("policy.saved_log_probs.append(",)
    ),
    "update_cell_run_again": Expected("same loss twice", ("loss",), ("loss = -prob[",)),
    "two_critics_share_a_target": Expected("shared part", ("embedded",), ("embedded = self.encoder(obss).tanh()",)),
    "penalty_with_attached_fakes": Expected("shared part", ("self.fake_B",), ("self.fake_B = self.netG(real_A)",)),
    "td3_loss_dict": Expected("shared part", ("joint",), ("joint = torch.cat([obs, action], 1)",)),
    "option_critic": Expected("shared part", ("state",), ("return self.features(obs)",)),
    "fakes_in_two_functions": Expected("shared part", ("sr",), ("sr = generator(lr).tanh()",)),
    "gan_discriminator_steps_first": Expected("changed parameter", ("D.2.weight",), ("opt_D.step()",)),
    "factor_vae": Expected("changed parameter", ("model.encoder.2.weight",), ("optimizer.step()",)),
    "maddpg_critic_first": Expected(
        "changed parameter", ("self.critic_network.2.weight",), ("self.critic_optim.step()",)
    ),
    "sac_policy_after_critics": Expected("changed parameter", ("self.qf1.2.weight",), ("self.qf1_optimizer.step()",)),
    "residual_added_in_place": Expected("changed value", ("out",), ("out += residual",)),
    "gate_then_inplace_relu": Expected("changed value", ("x",), ("x = self.act(x)",)),
    "update_by_hand": Expected("refused in place", ("p",), ("p.add_(",)),
    "sparse_codes_descend": Expected("refused in place", ("s_batch",), ("s_batch -= ",)),
    "neurons_edited": Expected("refused in place", ("layers[layer].dense.weight[:, pos]",), ("-= original",)),
    "fusion_weights_rectified": Expected("refused in place", ("",), ("weight = self.weight_relu(self.weight)",)),
    "hooks_and_inplace_relu": Expected("refused in place", ("",), ("out = mod(torch.rand(1, 3, 4, 4))",)),
    "channels_normalised": Expected("refused in place", ("t",), ("t.sub_(m).div_(s)",)),
    "model_copied_after_forward": Expected("copied", ("model.exp",), ("ema = deepcopy(model)",)),
    "rollout_under_inference_mode": Expected("inference tensor", ("inputs",), ("logps = self.model(inputs)",)),
    "coordinates_by_argmax": Expected("discrete", ("loss",), ("torch.argmax(output_coor_x, axis=1)",)),
    "losses_in_a_tensor": Expected("made a constant", ("loss",), ("balance_loss = torch.tensor(loss_list)",)),
    "validation_step_trained_on": Expected("gradients off", ("losses['loss']",), ("outputs = self.model(inputs)",)),
    "reentrant_checkpoint": Expected("checkpoint", ("loss",), ("x = checkpoint(r, x, use_reentrant=True)",)),
    "dice_by_numpy": Expected("made a constant", ("loss",), (".detach().numpy())",)),
    "maml_with_an_unused_head": Expected("not used", ("learner.regression_head.weight",), ()),
    "distances_twice": Expected("no second derivative", ("",), ("return torch.cdist(a, b)",)),
    "compiled_energy": Expected("no second derivative", ("",), ("y = model(positions)",)),
    "encoding_differentiable_once": Expected(
        "Function differentiable once", ("",), ("return self.network(encoded).square()",)
    ),
    "checkpoint_under_autocast": Expected("recomputed otherwise", ("",), ()),
    "dehazing_losses_together": Expected("changed parameter", ("self.disc.",), ("self.dis_optimizer.step()",)),
    "kernel_exponentials_once": Expected(
        "made once", ("self.kernel.length_scales",), ("self.signal_variance = torch.exp(self.log_signal)",)
    ),
    "log_probs_replayed": Expected(
        "carried over", ("batch[1][4]",), ("self.log_prob = action_probs.log_prob(action)",)
    ),
    "adapted_with_frozen_weights": Expected("nothing requires grad", ("self.params['model.0.haar_weights']",), ()),
    "environment_trained_in_evaluation": Expected(
        "gradients off", ("@torch.no_grad()",), ("output = self.model(data)",)
    ),
    "sampled_logits_data": Expected("detached", ("loss",), ("logits = torch.stack(logits, 1).data",)),
    "predictions_copied": Expected("made a constant", ("loss",), ("pre_y1 = torch.tensor(",)),
    "texts_embedded_by_the_dataset": Expected(
        "made once", ("dataset.tensor_frame.feat['text']",), ("return self.embedding(idx)",)
    ),
}
