"""Images in prompts: preparation, placement among the tokens, the encoder, and a cache of its results.

The layers of the model that read the resulting rows are in `engine/model/`. Decoding of files from clients is in
`server/images/`.
"""
