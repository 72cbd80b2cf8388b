"""`kvtier prove`: whether what a server answers from its KV cache is what it answers without, seen from outside.

A black box: HTTP alone, to any server with OpenAI's `/v1/completions`. Nothing of kvtier's engine is imported here.

1. *Prompts* share beginnings in known ways (`families.py`). Their tokens are drawn anew, so that no cache has seen
   them. Each ends with a copy of some tokens of its own middle: a language model goes on as it went on there, so its
   answer hangs on that place, and those of several prompts on places all over what is cached.
2. *References*: each prompt is asked twice where no cache can have it, under a salt of its own, once alone and once
   among others. Then the prompt with which it shares its beginning is asked, and then it, as users would.
3. *Distance* of two answers (`answer.py`): the largest difference of log probabilities among the likeliest tokens,
   token by token, up to the first at which the answers differ.
4. *Noise*: the largest distance between two references of one prompt, and between an answer's second half and the
   answer to the prompt with the first half behind it, which is the same by other shapes of computation. An answer is
   *wrong* if it is further from each reference than three times the noise, and than a thousandth. So a greedy answer
   may differ where the two likeliest tokens were closer than that. Before a server is blamed its suspects are
   computed as a whole four times more. The chance that a right answer is beyond all of n distances is one in n; three
   times the largest is far beyond where distances of rounding end.
5. *Control*: the ends of prompts behind other beginnings. Where such references are no further from each other than
   right answers may be, nothing is proven.
6. *Excess*: a server that tells cached tokens may tell at most those that this model was asked before, with this salt
   and this beginning. What is beyond is another's, whatever the answer.
"""
