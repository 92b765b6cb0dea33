"""The vault: secrets that are sealed before they are stored."""

import base64
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.durable.vault import Vault

OLD, NEW = "the old key of 16 or more", "the new key of 16 or more"
ONE = Vault(NEW)  # making a key takes its time


class TestSealed:
    @settings(max_examples=50)
    @given(st.text())
    def test_what_was_sealed_comes_out_again(self, secret):
        try:
            secret.encode()
        except UnicodeEncodeError:
            return
        assert ONE.open(ONE.seal(secret)) == secret

    def test_nothing_of_it_can_be_seen(self):
        sealed = ONE.seal("whsec_very+secret")
        assert "secret" not in sealed
        assert b"secret" not in base64.b64decode(sealed.rpartition(":")[2])
        assert NEW not in sealed

    def test_the_same_secret_looks_different_each_time(self):
        assert len({ONE.seal("a") for _ in range(20)}) == 20

    def test_the_same_key_in_another_process_opens_it(self):
        assert Vault(NEW).open(ONE.seal("a")) == "a"


class TestKeys:
    def test_the_first_key_seals_and_all_of_them_open(self):
        old = Vault(OLD)
        both = Vault(f"{NEW}, {OLD}")
        assert both.open(old.seal("a")) == "a"
        assert ONE.open(both.seal("b")) == "b"
        with pytest.raises(ValueError, match="TICKWHEEL_SECRET_KEY does not have"):
            old.open(both.seal("b"))

    def test_a_key_that_is_not_there_is_told_by_its_id_and_no_secret_is_shown(self):
        sealed = Vault(OLD).seal("whsec_secret")
        with pytest.raises(ValueError, match="was sealed with the key") as told:
            ONE.open(sealed)
        assert "whsec_secret" not in str(told.value)
        assert sealed.rpartition(":")[2] not in str(told.value)
        assert sealed.split(":")[1] in str(told.value)

    def test_without_any_key_a_sealed_one_stays_closed(self):
        with pytest.raises(ValueError, match="TICKWHEEL_SECRET_KEY"):
            Vault().open(ONE.seal("a"))

    @pytest.mark.parametrize("keys", ["short", f"{NEW},short", "x" * 15, "x,y"])
    def test_a_short_key_is_refused_and_not_shown(self, keys):
        with pytest.raises(ValueError, match="16 characters") as told:
            Vault(keys)
        assert keys not in str(told.value)

    @pytest.mark.parametrize("keys", [None, "", "  ", ",", " , "])
    def test_no_key_is_no_key(self, keys):
        assert Vault(keys).seal("a") == "plain:a"

    def test_a_key_is_not_in_what_a_vault_shows_of_itself(self):
        assert NEW not in repr(ONE)
        assert NEW not in str(vars(ONE))


class TestPlain:
    def test_without_a_key_it_is_stored_as_it_is_and_a_warning_says_so_once(self, caplog):
        vault = Vault()
        with caplog.at_level(logging.WARNING, "tickwheel"):
            assert [vault.open(vault.seal(one)) for one in ("a", "sealed:b", "")] == [
                "a", "sealed:b", "",
            ]  # fmt: skip
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "TICKWHEEL_SECRET_KEY" in record.getMessage()

    def test_with_a_key_what_was_stored_without_one_is_read_still(self):
        assert ONE.open(Vault().seal("a")) == "a"


class TestDamaged:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[:-4],
            lambda text: text[:-8] + "AAAAAAA=",
            lambda text: text + "!",
            lambda text: text.rpartition(":")[0] + ":",
            lambda text: text.rpartition(":")[0] + ":AAAA",
            lambda text: text.rpartition(":")[0] + ":é",
            lambda text: text.rpartition(":")[0],
        ],
        ids=["cut", "changed", "garbage", "empty", "short", "not ascii", "no body"],
    )
    def test_it_is_told_and_nothing_is_given(self, damage):
        with pytest.raises(ValueError, match="damaged"):
            ONE.open(damage(ONE.seal("whsec_secret")))

    @pytest.mark.parametrize("text", ["", "whsec_secret", "sealed", "sealed:", ":", "SEALED:a:b"])
    def test_what_no_vault_has_sealed_stays_closed_and_is_not_shown(self, text):
        with pytest.raises(ValueError, match=r"key|damaged") as told:
            ONE.open(text)
        assert "whsec_secret" not in str(told.value)

    def test_every_byte_counts(self):
        text = ONE.seal("a")
        head, _, body = text.rpartition(":")
        data = base64.b64decode(body)
        for place in range(len(data)):
            flipped = bytearray(data)
            flipped[place] ^= 1
            with pytest.raises(ValueError, match="damaged"):
                ONE.open(f"{head}:{base64.b64encode(flipped).decode()}")
