"""SamplingDefaults: the sampling parameters in a model's `generation_config.json`."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from transformers import PreTrainedModel

from kvtier.engine.model.sampling import InvalidParameter, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's default sampling parameters, for requests that leave these parameters out.

    A field is None if the model has no default. As in vLLM, all other settings of the model's file, such as
    `do_sample`, are ignored.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # the model's max_new_tokens

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the defaults of a loaded model. Raise ValueError if one of them is invalid for a request."""
        generation = getattr(model, "generation_config", None)
        found: dict[str, object] = {} if generation is None else generation.to_diff_dict()
        names = {field.name: field.name for field in fields(cls)} | {"max_tokens": "max_new_tokens"}
        settings = {ours: found.get(theirs) for ours, theirs in names.items()}
        if settings["top_k"] == -1:  # like 0, this means to keep every token
            settings["top_k"] = 0
        defaults = cls(**settings)  # type: ignore[arg-type]  # checked next
        try:
            defaults.over(SamplingParams())
        except (InvalidParameter, TypeError) as error:
            raise ValueError(f"the model's generation_config: {error}; set model.generation_config to none") from None
        return defaults

    @property
    def given(self) -> dict[str, float]:
        """Defaults that the model sets, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, params: SamplingParams) -> SamplingParams:
        """Return a copy of *params* with the model's defaults, which replace even values that a client has given."""
        return replace(params, **self.given)  # type: ignore[arg-type]  # the values are checked by `of`


NO_DEFAULTS = SamplingDefaults()
