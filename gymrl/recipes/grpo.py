"""A reference trainer: group-relative policy optimisation over gymrl's rollouts.

::

    python -m gymrl.recipes.grpo                                   # one process trains
    torchrun --standalone --nproc-per-node 2 -m gymrl.recipes.grpo # two do
    torchrun ... -m gymrl.recipes.grpo my.yaml --set steps=200
    torchrun ... -m gymrl.recipes.grpo --task look_up

Without a file or a task it teaches a tiny untrained model to say words
(:mod:`gymrl.recipes.say_word`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers

import gymrl.torchrun
from gymrl.errors import ConfigError, OutputError
from gymrl.generation.model_loading import without_progress_bars
from gymrl.generation.models import resolve_model
from gymrl.generation.weight_transfer import whole
from gymrl.recipes import checkpoint
from gymrl.recipes.loss import OtherLogprobs, group_advantages, token_loss
from gymrl.recipes.micro_batches import MicroBatch, Samples, token_micro_batches
from gymrl.recipes.settings import GrpoConfig, own_device, read_config, rollout_config
from gymrl.recipes.tasks import OWN_TASKS, validation_rows
from gymrl.recipes.tracking import Tracker

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from gymrl.torchrun import Rollouts, Share

logger = logging.getLogger(__name__)


class Trainer:
    """A model, its optimizer, and one step at a time. Every method is a collective.

    Args:
        config: Of the run.
        model: Plain; it is wrapped here.
        reference: For the divergence; kept as it is.
        pad_token_id: For batches.
    """

    def __init__(
        self,
        config: GrpoConfig,
        model: torch.nn.Module,
        reference: torch.nn.Module | None,
        pad_token_id: int,
    ) -> None:
        self._config = config
        self._reference = reference
        self._pad_token_id = pad_token_id
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._device = next(model.parameters()).device
        self.model = self._wrapped(model)
        # A short memory of squares: where all goes well gradients are small, and one bad sample
        # must not become a step of many times the learning rate.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        model.train()
        if self._world == 1:
            return model
        if self._config.parallel == "ddp":
            return torch.nn.parallel.DistributedDataParallel(model)
        # Loads seconds of torch that replicated training does not need.
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        # What the architecture itself says must stay together: its layers.
        units = set(getattr(model, "_no_split_modules", None) or ())
        for module in list(model.modules()):
            if type(module).__name__ in units:
                fully_shard(module)
        fully_shard(model)
        return model

    def step(self, share: Share) -> dict[str, float]:
        """Learn from this rank's share.

        Returns:
            Numbers over all ranks' tokens.
        """
        config = self._config
        micro_batches = self._micro_batches(share)
        tokens = self._sum([float(sum(int(m.mask.sum()) for m in micro_batches))])[0]
        totals = torch.zeros(7, dtype=torch.float64)
        worst_gap = 0.0
        norm = 0.0
        # Where nothing is learned from, momentum alone must not move the model.
        for update in range(config.updates_per_step if tokens else 0):
            for number, micro in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with self._synchronised(is_last):
                    loss, numbers, gap = self._forward(micro, is_first=update == 0)
                    # DDP and FSDP average over ranks; the loss is a mean over all ranks' tokens.
                    (loss * self._world / max(tokens, 1.0)).backward()  # type: ignore[no-untyped-call]
                totals += numbers
                worst_gap = max(worst_gap, gap)
            norm = self._update()
        policy, kl, clipped, weight, entropy, gap_sum, fresh = self._sum(totals.tolist())
        per_update = max(tokens, 1.0) * config.updates_per_step
        return {
            "loss": policy / per_update,
            "kl": kl / per_update,
            "clipped_rate": clipped / per_update,
            "importance_weight": weight / per_update,
            "entropy": entropy / per_update,
            "logprob_gap_mean": gap_sum / max(fresh, 1.0),
            "logprob_gap_max": self.largest(worst_gap),
            "gradient_norm": norm,
            "trained_tokens": tokens,
        }

    def _micro_batches(self, share: Share) -> list[MicroBatch]:
        """This rank's, as many as every other rank has: sharded layers run in step."""
        micro_batches: list[MicroBatch] = []
        if share.groups:
            samples = self._samples(share)
            trained = samples.mask[:, 1:].any(1).nonzero()[:, 0]
            micro_batches = [
                MicroBatch(samples.at(trained[indices].tolist()))
                for indices in token_micro_batches(
                    samples.lengths[trained], self._config.micro_batch_tokens
                )
            ]
        wanted = int(self.largest(float(max(1, len(micro_batches)))))
        missing = wanted - len(micro_batches)
        micro_batches += [MicroBatch(Samples.empty(self._pad_token_id)) for _ in range(missing)]
        return [micro.to(self._device) for micro in micro_batches]

    def _samples(self, share: Share) -> Samples:
        batch = share.batch(pad_token_id=self._pad_token_id)
        columns, valid = batch.final_batch, batch.reward_valid
        ages = share.token_ages(batch)
        trains = valid & ~columns["mask_sample"] & (columns["loss_multiplier"] > 0)
        mask = batch.token_mask & trains[:, None]
        if self._config.loss.max_token_age is not None:
            mask &= ages <= self._config.loss.max_token_age
        return Samples(
            token_ids=batch.token_ids,
            lengths=batch.lengths,
            mask=mask,
            sampled=batch.generation_logprobs,
            ages=ages,
            advantages=group_advantages(
                columns["total_reward"], valid, batch.group_index, self._config.advantage
            ),
        )

    def _forward(
        self, micro: MicroBatch, *, is_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        config = self._config
        logprobs, entropy = self._logprobs(self.model, micro)
        if is_first:
            micro.proximal = logprobs.detach()
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, micro)[0]
        others = OtherLogprobs(micro.proximal, micro.sampled, micro.is_stale, reference)
        terms = token_loss(logprobs, others, micro.advantages, micro.mask, config.loss)
        loss = terms.policy + config.kl_coefficient * terms.kl
        # The weights of the step sampled these tokens: trainer and generator must agree on them.
        is_fresh = micro.mask & ~micro.is_stale & is_first
        gaps = (micro.proximal - micro.sampled).abs() * is_fresh
        numbers = [*terms, (entropy * micro.mask).sum(), gaps.sum(), is_fresh.sum()]
        return (
            loss,
            torch.tensor([float(number.detach()) for number in numbers], dtype=torch.float64),
            float(gaps.max()),
        )

    def _logprobs(
        self, model: torch.nn.Module, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token from the first that counts, and the entropy where it was sampled."""
        output = model(
            input_ids=micro.token_ids,
            attention_mask=micro.attention,
            use_cache=False,
            logits_to_keep=micro.token_ids.shape[1] - micro.start,
        )
        logits = output.logits[:, :-1].float() / (self._config.sampling.temperature or 1.0)
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, micro.token_ids[:, 1 + micro.start :, None])[..., 0]
        entropy = -(every.detach().exp() * every.detach()).sum(-1)
        return chosen, entropy

    @contextlib.contextmanager
    def _synchronised(self, is_last: bool) -> Iterator[None]:
        """Gradients cross ranks once an update, with the last micro-batch."""
        model = self.model
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not is_last:
            with model.no_sync():
                yield
            return
        yield

    def _update(self) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._config.max_grad_norm
        )
        size = float(whole(norm))
        if not math.isfinite(size):
            raise FloatingPointError(
                f"the gradient's norm is {size}, and would make every parameter so; nothing was "
                "changed. A logit or a ratio has overflowed: lower learning_rate, kl_coefficient or "
                "updates_per_step"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return size

    def _sum(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        if self._world > 1:
            dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def largest(self, value: float) -> float:
        """Of all ranks' values."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self._device)
        if self._world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)


def train(config: GrpoConfig, *, is_live: bool = False) -> None:
    """Run to the last step, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    device = own_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model_path = _model_path(config)
    job, rows = rollout_config(config, model_path)
    with gymrl.torchrun.rollouts(job, rows=rows) as rollouts, contextlib.ExitStack() as stack:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
        model = _loaded(model_path).to(device)
        reference = _loaded(model_path).to(device) if config.kl_coefficient > 0 else None
        # Padding is attended by nothing and counts nowhere: where there is no token for it any does.
        trainer = Trainer(config, model, reference, tokenizer.pad_token_id or 0)
        done = _resume(config, trainer, rollouts)
        if done >= config.steps and rollouts.rank == 0:
            logger.info("all %d steps are done; remove %s to begin anew", done, config.output)
        tracker = None
        if rollouts.rank == 0:
            tracker = Tracker(
                config.output,
                steps=config.steps,
                resumed_at=done,
                is_live=is_live,
                tensorboard=config.tensorboard,
            )
            stack.enter_context(tracker)
            if not is_live:
                logger.info("each step's numbers go to %s; --live shows them", tracker.path)
        shares = _shares(config, rollouts)
        stack.callback(shares.close)
        for step in range(done + 1, config.steps + 1):
            metrics = _one_step(config, trainer, rollouts, shares, step)
            if tracker is not None:
                tracker.add(step, metrics)
            is_last = step == config.steps
            if config.checkpoint_every and (is_last or step % config.checkpoint_every == 0):
                extra = {"rollouts": rollouts.state_dict()}
                checkpoint.save(config.output, step, trainer.model, trainer.optimizer, extra)
        if tracker is not None and is_live:
            logger.info("the rewards are drawn in %s", tracker.plot())


def _model_path(config: GrpoConfig) -> str:
    if config.model is not None:
        return resolve_model(config.model)
    directory = Path(config.output) / f"model-{config.seed}"
    return str(OWN_TASKS[config.benchmark].build_model(directory, config.seed))


def _loaded(path: str) -> Any:
    with without_progress_bars():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _resume(config: GrpoConfig, trainer: Trainer, rollouts: Rollouts) -> int:
    found = checkpoint.latest(config.output)
    here = checkpoint.step_of(found) if found is not None else 0
    least, most = -int(trainer.largest(-here)), int(trainer.largest(here))
    if least != most:
        raise OutputError(
            f"some ranks find a checkpoint after step {most} in {config.output}, others one after "
            f"step {least} (0: none); output must be a directory that every node sees",
            path=config.output,
        )
    if found is None:
        return 0
    done, extra = checkpoint.load(found, trainer.model, trainer.optimizer)
    rollouts.load_state_dict(extra["rollouts"])
    rollouts.update_weights(trainer.model, advance=False)
    logger.info("going on after step %d, from %s", done, found)
    return done


def _shares(config: GrpoConfig, rollouts: Rollouts) -> Generator[Share, None, None]:
    """Each step's share: collected when it is wanted, or generated ahead."""
    if config.max_staleness > 0:
        yield from rollouts.stream(
            num_generations=config.num_generations,
            groups_per_step=config.prompts_per_step,
            max_staleness=config.max_staleness,
        )
    while True:
        rows = rollouts.take(config.prompts_per_step)
        yield rollouts.collect(rows, num_generations=config.num_generations)


def _one_step(
    config: GrpoConfig,
    trainer: Trainer,
    rollouts: Rollouts,
    shares: Generator[Share, None, None],
    step: int,
) -> dict[str, float]:
    began = time.perf_counter()
    share = next(shares)
    rolled_out = time.perf_counter()
    learned = trainer.step(share)
    trained = time.perf_counter()
    rollouts.update_weights(trainer.model)
    updated = time.perf_counter()
    metrics = share.metrics | learned
    if config.validate_every and step % config.validate_every == 0:
        rows = validation_rows(config)
        held = rollouts.collect(rows, sampling=config.validation_sampling, training=False)
        metrics |= {f"validation/{name}": value for name, value in held.metrics.items()}
    total = time.perf_counter() - began
    return metrics | {
        "seconds": total,
        "share/rollout": (rolled_out - began) / total,
        "share/train": (trained - rolled_out) / total,
        "share/weights": (updated - trained) / total,
        "share/validation": (time.perf_counter() - updated) / total,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module.

    Args:
        arguments: Without the program's name; None: the process's own.

    Raises:
        SystemExit: 2, when the command line or a setting is wrong.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(logging.INFO)
    try:
        config, is_live = read_config(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        sys.stderr.write(f"gymrl.recipes.grpo: error: {error}\n")
        raise SystemExit(2) from None
    train(config, is_live=is_live)


if __name__ == "__main__":
    main()
