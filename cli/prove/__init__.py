"""The `kvtier prove` command, a black-box test that a server answers the same with and without its KV cache.

It uses only HTTP and works with any server that has OpenAI's `/v1/completions`. It imports nothing of kvtier's engine.

1. *Prompts* share prefixes in known ways (`families.py`). Their tokens are random, so that no cache has seen them. Each
   prompt ends with a copy of some tokens from its own middle. A language model continues as the text did there, so the
   answer depends on that position. The answers to several prompts depend on positions all over the cached prefix.
2. *References*: each prompt is sent twice under a new salt, so that no cache can serve it, once alone and once among
   concurrent requests. Then a prompt that shares its prefix is sent, and then the prompt itself, as users would.
3. *Distance* of two answers (`answer.py`): the largest difference of log probabilities among the most likely tokens,
   token by token, up to the first token at which the answers differ.
4. *Noise*: the largest distance between two references of one prompt, or between the second half of an answer and the
   answer to the prompt plus the first half. Those two are the same tokens in another computation shape. An answer is
   *wrong* if its distance to each reference is more than three times the noise and more than 0.001. So a greedy answer
   may differ where the two most likely tokens were closer than that. Before a server is blamed, the suspect prompts are
   fully computed four more times. The chance that a correct answer is beyond all of n distances is one in n. Three
   times the largest distance is far more than rounding causes.
5. *Control*: prompts that have the same end after different beginnings. If such references are no further apart than
   correct answers may be, nothing is proven.
6. *Excess*: a server may report as cached at most the tokens that this model has been sent before with this salt and
   prefix. More cached tokens must belong to another model or salt, even if the answer is correct.
"""
