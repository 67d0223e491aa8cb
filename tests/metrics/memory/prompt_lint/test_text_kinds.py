"""What kind of text it is."""

import pytest

from sojourn.metrics.memory.prompt_lint.text_kinds import kind_of, pieces

TEXTS = {
    "JSON": '{"rows": [{"id": 1, "name": "harbour"}, {"id": 2, "name": "pier"}]}',
    "code": "def depth(place):\n    return table[place]\n\nfor place in places:\n    print(place)\n",
    "digits": "2026-11-23 10:20:30 192.168.10.17 48151623 42 1024 65536",
    "prose, Latin": "The harbour is twelve metres deep at low tide, and ships of that draught can enter it.",
    "prose, Cyrillic": "Глубина гавани двенадцать метров при отливе.",
    "prose, Greek": "Το λιμάνι έχει βάθος δώδεκα μέτρα.",
    "prose, CJK": "港口在退潮时有十二米深。",
    "prose, Kana": "港は干潮のとき十二メートルの深さです。",
    "prose, Hangul": "항구는 썰물 때 수심이 십이 미터이다.",
    "prose, Arabic": "عمق الميناء اثنا عشر مترا عند الجزر",
    "prose, Devanagari": "बंदरगाह बारह मीटर गहरा है",
    "other": " ... !!! \n",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_is_of_the_kind_that_a_reader_sees(kind):
    assert kind_of(TEXTS[kind]) == kind


def test_json_that_is_cut_off_is_still_json():
    assert kind_of('{"id": 1, "name": "harbour", "depth": 12, "tides": [1, 2, 3], "open": true, "shi') == "JSON"


def test_prose_with_a_number_and_a_quotation_is_prose():
    assert kind_of('In 2026 he said: "The harbour is 12 metres deep"; nobody had measured it.') == "prose, Latin"


def test_pieces_lose_no_visible_character():
    text = "one\n\ntwo three\n \n" + "x" * 2000
    assert "".join("".join(pieces(text)).split()) == "".join(text.split())
    assert max(map(len, pieces(text))) <= 800
