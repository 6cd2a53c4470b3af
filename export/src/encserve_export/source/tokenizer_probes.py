"""Lists difficult texts for comparing two tokenizers.

If two versions of a tokenizer differ, they usually return different ids for at least one of these texts.
"""

from collections.abc import Iterable
from typing import Any

_EMPTY = ("", " ", "   ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\x00", "\ufeff")
_BLANKS = (
    " leading blank",
    "trailing blank ",
    "  two  blanks   and three  ",
    "a\tb\tc",
    "first line\nsecond line\n\nfourth line\n",
    "carriage\r\nreturn\rfeed\x0b\x0c",
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space, line\u2028separator, next\u0085line",
    "\n\n  The cat\n",
    " .",
    "a",
    " a",
)
_CASE = (
    "cats",
    "Cats",
    "CATS",
    "cATS and DOGS",
    "The Cat SAT on the Mat.",
    "iPhone McDonald NASA's eBay",
    "STRASSE Straße straße ẞ",
    "İstanbul ISPARTA ıspanak DİYARBAKIR",
    "ΟΔΥΣΣΕΥΣ Ὀδυσσεύς ὈΔΥΣΣΕΎΣ",
    "ǅ ǆ Ǆ ŉ ﬀ",
    "ÀÉÎÕÜ àéîõü ÅÄÖ åäö Ñ ñ Ç ç",
    "МОСКВА Москва москва Ёлка",
)
_ACCENTS = (
    "naïve café résumé façade",
    "nai\u0308ve cafe\u0301 re\u0301sume\u0301",
    "Ti\u1ebfng Vi\u1ec7t: \u0111\u01b0\u1eddng ph\u1ed1",
    "Z\u0351\u036b\u0343a\u0332\u030al\u0337g\u0321o\u0328",
    "\u0301 alone, a\u0301\u0302\u0303 stacked",
    "q\u0323\u0307 q\u0307\u0323 \u1e69 s\u0323\u0307",
    "Grüße aus Köln, Ærøskøbing, Łódź, Đà Nẵng",
    "й е\u0306 ё е\u0308 が か\u3099 각 \u1100\u1161\u11a8",
    "\u212b \u00c5 A\u030a \u2126 \u03a9",
)
_WIDE_AND_LIGATURES = (
    "Ｆｕｌｌ ｗｉｄｔｈ ＡＢＣ １２３！？",
    "ﾊﾝｶｸ ｶﾞｷﾞ",
    "ﬁnd the oﬀer, ﬂat aﬃx, ﬄ ﬅ ﬆ",
    "① ② Ⅳ ⅷ ½ ¾ ² ³ ™ ℠ № ㎏ ㍿ ﷺ",
    "𝐁𝐨𝐥𝐝 𝑖𝑡𝑎𝑙𝑖𝑐 𝕯𝖔𝖚𝖇𝖑𝖊 𝚖𝚘𝚗𝚘",
    "“curly” ‘quotes’ „low“ «guillemets» … – — ― ′ ″",
    "ª º µ ſ ĳ Ǳ ϒ ϐ",
)
_CONTROL = (
    "nul\x00in the middle",
    "bell\x07 backspace\x08 escape\x1b[31mred delete\x7f",
    "c1\x80\x9f controls",
    "soft\u00adhyphen zero\u200bwidth\u200cnon\u200djoiner\u2060word",
    "\ufeffbyte order mark\ufeff",
    "\u202aembedded\u202c \u202eoverride\u202c \u2066isolate\u2069",
    "replacement \ufffd and private \ue000 \U000f0000",
    "noncharacter \ufffe \uffff",
    "variation a\ufe0f \u2764\ufe0e \u2764\ufe0f",
    "interlinear \ufff9a\ufffab\ufffb tag \U000e0041\U000e0042",
    "unassigned \u0378 \U0003fffd",
)
_LONG = (
    "a" * 99,
    "a" * 100,
    "a" * 101,
    "the" * 34,
    "x" * 199,
    "x" * 200,
    "x" * 201,
    "antidisestablishmentarianism" * 8,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "東" * 120,
    "é" * 101,
    "9" * 120,
    "-" * 120,
    "word " * 60,
    "😀" * 40,
)
_SCRIPTS = (
    "東京 大阪 名古屋",
    "我喜欢自然语言处理。你呢？",
    "繁體中文與简体中文",
    "\u3400\u4dbf \U00020000\U0002a6d6 \uf900\uf9ff",
    "これはペンです。カタカナ、ひらがな、漢字。",
    "안녕하세요 세계 한국어",
    "mixed中文and英文words東京Tokyo",
    "שלום עולם, עִבְרִית",
    "مرحبا بالعالم العَرَبِيَّة ـ كشيدة",
    "English עברית English عربي 123",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทย",
    "ကမ္ဘာ မြန်မာ",
    "გამარჯობა მსოფლიო ᲒᲐᲛᲐᲠᲯᲝᲑᲐ",
    "Բարեւ աշխարհ",
    "Καλημέρα κόσμε",
    "Привет, мир! Съешь ещё этих мягких французских булок",
    "ᏣᎳᎩ ꮳꮃꭹ ᚠᚢᚦ",
    "\U00012000 \ua66e \U00010400\U00010428 \U0001e900\U0001e922",
    "ᠮᠣᠩᠭᠣᠯ བོད་སྐད",
)
_EMOJI = (
    "😀",
    "I ❤️ this 👍🏽!",
    "👨‍👩‍👧‍👦 family 🏳️‍🌈 flag",
    "🇩🇪🇫🇷🇯🇵 1️⃣ #️⃣",
    "🤷🏿‍♀️🧑🏻‍🚀",
    "text😀without🎉blanks",
)
_DIGITS_AND_MARKS = (
    "0 1 12 123 1234 12345 1234567890",
    "3.14159 1,000,000.50 1e-5 0x1F 50% $9.99 €5",
    "2026-11-23T13:05:14Z 12:30pm 1/2",
    "١٢٣ ۱۲۳ १२३ 零一二",
    "a1b2c3 x86_64 v1.2.3-rc.1",
    "H2O CO₂ x² aⁿ",
    "!?!?... --- *** ### @@@ $$$ %%% ^^^ &&& ~~~ ```",
    "() [] {} <> << >> </s> <a href='#'>",
    "don't can't I'll we've he's o'clock rock'n'roll",
    "DON'T CAN'T I'LL",
    "semi;colon:comma,dot.no blanks!after?marks",
    "¿Qué? ¡Hola! § ¶ † ‡ • ‰",
    "a+b=c; a<b>c; a|b\\c/d",
    "+-×÷≠≤≥∞∑∂√∫ ∀x∈A",
    "_under_score_ __init__ snake_case camelCase kebab-case",
    "##ing ##s ▁the Ġthe Ċ @@ </w>",
)
_REAL = (
    "https://example.com/path?q=1&lang=de#top",
    "Mail jane.doe+test@example.co.uk or call +49 (0)30 123-456.",
    "C:\\Users\\me\\file.txt /usr/local/bin ../x",
    "def f(x):\n    return x ** 2  # squares\n",
    '{"key": [1, 2.5, null, true], "a": "b\\n"}',
    "SELECT * FROM t WHERE a = 'b' -- comment",
    '<html><body class="x">Text &amp; more</body></html>',
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "query: how do I bake bread?",
    "passage: Bread is baked at 230 °C for 35 minutes.",
    "Represent this sentence for searching relevant passages: ",
    "Grüße aus Köln, 東京 и Москва: naïve café 🌍",
    "The cat sleeps on the warm windowsill while it rains. ",
)
TEXTS = (
    *_EMPTY,
    *_BLANKS,
    *_CASE,
    *_ACCENTS,
    *_WIDE_AND_LIGATURES,
    *_CONTROL,
    *_LONG,
    *_SCRIPTS,
    *_EMOJI,
    *_DIGITS_AND_MARKS,
    *_REAL,
)
# A tokenizer may have thousands of special and added tokens. Only the first 40 of them are put into texts.
_MOST_TOKENS = 40


def difficult_texts(tokenizer: Any) -> list[str]:
    """Return `TEXTS`, and texts that contain the special and added tokens of a transformers tokenizer."""
    return [*TEXTS, *around_tokens(dict.fromkeys([*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]))]


def around_tokens(tokens: Iterable[str]) -> list[str]:
    """Return texts that contain the given tokens, alone and between words."""
    listed = list(tokens)[:_MOST_TOKENS]
    texts = [text for token in listed for text in (token, f"a {token} b", f"A{token}B", f"  {token}  {token}\n")]
    for token in listed[:8]:
        texts += [token.lower(), token.upper(), f"{token[:-1]} {token[-1:]}", f"é{token}ﬁ{token}東"]
    return [*texts, "".join(listed), " ".join(listed)]
