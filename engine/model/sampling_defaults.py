"""SamplingDefaults: the sampling that a model's makers advise, in its `generation_config.json`."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from transformers import PreTrainedModel

from kvtier.engine.model.sampling import SamplingParams, WrongParameter


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request does not say; None where the model does not say either. Which settings count, and that
    `do_sample` does not, is vLLM's choice."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # the model's max_new_tokens

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Those of a loaded model. ValueError, with what to do, for one that no request may have."""
        generation = getattr(model, "generation_config", None)
        found: dict[str, object] = {} if generation is None else generation.to_diff_dict()
        names = {field.name: field.name for field in fields(cls)} | {"max_tokens": "max_new_tokens"}
        settings = {ours: found.get(theirs) for ours, theirs in names.items()}
        if settings["top_k"] == -1:  # another way to say that it keeps every token
            settings["top_k"] = 0
        defaults = cls(**settings)  # type: ignore[arg-type]  # checked next
        try:
            defaults.over(SamplingParams())
        except (WrongParameter, TypeError) as error:
            raise ValueError(f"the model's generation_config: {error}; set model.generation_config to none") from None
        return defaults

    @property
    def given(self) -> dict[str, float]:
        """The settings that the model has, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, params: SamplingParams) -> SamplingParams:
        """*params* with the model's settings in place of theirs."""
        return replace(params, **self.given)  # type: ignore[arg-type]  # counts are whole, as in the model's settings


NO_DEFAULTS = SamplingDefaults()
