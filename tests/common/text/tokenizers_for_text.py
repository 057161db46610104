"""Small tokenizers built in memory: byte-level with merges, and one with byte fallback."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox, naïve café — £5, 10 °C.",
    "東京都は日本の首都です。人口は約一千四百万人。",
    "한국어 문장을 토큰으로 나눕니다.",
    "😀😃👩‍👩‍👧‍👦🇩🇪👍🏽 emoji ✨",
    "中文的句子,没有空格。\ufffd 也有替换字符\ufffd\ufffd",
]
END_OF_TEXT = "<|end|>"
"""A special token."""
MARK = "[[→]]"
"""An added token that is not special and lies outside the byte alphabet."""


def build_byte_level(vocab_size: int = 330) -> Tokenizer:
    """Byte-level BPE: most characters beyond ASCII take two to four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.add_tokens([AddedToken(MARK, special=False, normalized=False)])
    return tokenizer


def build_byte_fallback() -> Tokenizer:
    """Words with a leading mark for the space, bytes for what the vocabulary lacks."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "▁hello", "▁world", "lo", "wor", ",", "京", "▁東"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer
