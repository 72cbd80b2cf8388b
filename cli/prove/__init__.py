"""The `kvtier prove` command, a black-box test that a server answers the same with and without its KV cache.

It uses only HTTP and works with any server that has OpenAI's `/v1/completions`. It imports nothing of kvtier's engine.

1. *Prompts* share prefixes in known ways (`families.py`). Their tokens are random, so no cache has seen them. Each
   prompt ends with a copy of some of its own earlier tokens. A language model repeats what followed those tokens, so
   its answer depends on their position. Over many prompts, these positions cover the whole cached prefix.
2. *References* are answers that no cache can have served. To get them, each prompt is sent twice with new salts: once
   alone and once among concurrent requests. Later, another prompt with the same prefix is sent, and then the prompt
   again. Now the server may use its cache, and its answer is compared with the references.
3. *Distance* of two answers (`answer.py`): the largest difference of log probabilities among the most likely tokens. It
   is measured token by token, up to the first token at which the answers differ.
4. *Noise* is the largest distance between correct answers. It is measured between the references of one prompt. It is
   also measured by appending the first half of an answer to its prompt and computing the second half again. That gives
   the same tokens, but in a batch of another shape. An answer is *wrong* if its distance to each reference is more than
   0.001 and more than three times the noise. So if two tokens are about equally likely, either is accepted. Before an
   answer is reported as wrong, its prompt is fully computed four more times, which may raise the noise.
5. *Controls* are pairs of prompts with different beginnings and the same end. If the answers to such a pair hardly
   differ, answers do not depend on the cached prefix, and the test proves nothing.
6. *Excess* is the number of cached tokens that the server reports, although no earlier request with the same model,
   salt and prefix explains them. They came from another model or salt, which is an error even if the answer is correct.
"""
