"""The `kvtier prove` command, a black-box test that a server answers the same with and without its KV cache.

It uses only HTTP and works with any server that has OpenAI's `/v1/completions`. It imports nothing of kvtier's engine.

1. *Prompts* share prefixes in known ways (`families.py`). Their tokens are random, so that no cache has seen them. Each
   prompt ends with a copy of some tokens from its own middle. A language model continues as the text did there, so the
   answer depends on that position. The answers to several prompts depend on positions all over the cached prefix.
2. *References*: each prompt is sent twice under a new salt, so that no cache can serve it, once alone and once among
   concurrent requests. Then a prompt that shares its prefix is sent, and then the prompt itself, as users would.
3. *Distance* of two answers (`answer.py`): the largest difference of log probabilities among the most likely tokens,
   token by token, up to the first token at which the answers differ.
4. *Noise*: the largest distance between correct answers. Two references of one prompt are compared, and the second half
   of an answer is compared with the answer to the prompt plus the first half: the same tokens, computed in another
   shape. An answer is *wrong* if its distance to each reference is more than 0.001 and more than three times the noise.
   So a greedy answer may have another token where the two most likely tokens were closer than that. Before a server is
   blamed, the suspect prompts are fully computed four more times. A correct answer exceeds the largest of n such
   distances with a chance of only one in n, and rounding does not cause three times the largest distance.
5. *Control*: pairs of prompts with the same end after different beginnings. If the references of such a pair are no
   further apart than correct answers may be, answers do not depend on the cached prefix, and nothing is proven.
6. *Excess*: a server may report as cached at most the tokens that earlier requests have sent to this model with this
   salt and prefix. More cached tokens must belong to another model or salt, even if the answer is correct.
"""
