"""The `kvtier prove` command, a black-box test that a server answers the same with and without its KV cache.

It uses only HTTP and works with any server that has OpenAI's `/v1/completions`. It imports nothing of kvtier's engine.

1. *Prompts* share prefixes in known ways (`families.py`). Their tokens are random, so that no cache has seen them. Each
   prompt ends with a copy of some tokens from its own middle. A language model continues as the text did there, so the
   answer depends on that position. In several prompts these positions are spread over the whole cached prefix.
2. *References* are answers that no cache can have served. Each prompt is sent twice with new salts, once alone and once
   among concurrent requests. Later, a prompt that shares its prefix is sent, and then the prompt itself. This time the
   server may use its cache, and its answer is compared with the references.
3. *Distance* of two answers (`answer.py`): the largest difference of log probabilities among the most likely tokens,
   token by token, up to the first token at which the answers differ.
4. *Noise* is the largest distance between correct answers. It is measured between the references of one prompt, and by
   computing the second half of an answer again after a prompt that includes the first half. That gives the same
   tokens, but computed in a batch of another shape. An answer is *wrong* if its distance to each reference is more than
   0.001 and more than three times the noise. So another token is accepted where two tokens were about equally likely.
   Before an answer is reported as wrong, its prompt is fully computed four more times, which may raise the noise.
5. *Controls* are pairs of prompts with different beginnings and the same end. If the references of such a pair differ
   no more than correct answers may, answers do not depend on the cached prefix, and the test proves nothing.
6. *Excess* is the number of cached tokens that the server reports, but cannot have from an earlier request with the
   same model, salt and prefix. These tokens must belong to another model or salt, even if the answer is correct.
"""
