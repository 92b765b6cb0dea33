"""The vault: secrets that are sealed before they are stored."""

import base64
import hashlib
import logging

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.durable.directory.vault import Vault

OLD, NEW = "the old key of 16 or more", "the new key of 16 or more"
ONE = Vault(NEW)  # making a key takes its time
OWNER = '["mail", "https://a.example:443", "secret"]'


class TestSealed:
    @settings(max_examples=50)
    @given(st.text())
    def test_a_sealed_secret_opens_again(self, secret):
        try:
            secret.encode()
        except UnicodeEncodeError:
            return
        assert ONE.open(ONE.seal(secret, OWNER), OWNER) == secret

    def test_the_sealed_text_reveals_nothing(self):
        sealed = ONE.seal("whsec_very+secret", OWNER)
        assert "secret" not in sealed
        assert b"secret" not in base64.b64decode(sealed.rpartition(":")[2])
        assert NEW not in sealed

    def test_the_same_secret_looks_different_each_time(self):
        assert len({ONE.seal("a", OWNER) for _ in range(20)}) == 20

    def test_the_same_key_in_another_process_opens_it(self):
        assert Vault(NEW).open(ONE.seal("a", OWNER), OWNER) == "a"


class TestBound:
    @pytest.mark.parametrize(
        "other",
        [
            '["sms", "https://a.example:443", "secret"]',
            '["acme/mail", "https://a.example:443"]',
            "",
        ],
    )
    def test_it_opens_for_its_owner_only(self, other):
        sealed = ONE.seal("whsec_secret", OWNER)
        with pytest.raises(ValueError, match="another service") as raised:
            ONE.open(sealed, other)
        assert "whsec_secret" not in str(raised.value)
        assert ONE.open(sealed, OWNER) == "whsec_secret"

    def test_it_is_bound_with_an_older_key_as_well(self):
        sealed = Vault(OLD).seal("a", OWNER)
        both = Vault(f"{NEW},{OLD}")
        assert both.open(sealed, OWNER) == "a"
        with pytest.raises(ValueError, match="another service"):
            both.open(sealed, "another")

    def test_an_unbound_secret_of_an_earlier_version_stays_closed_with_advice(self):
        key = hashlib.scrypt(NEW.encode(), salt=b"tickwheel secret", n=2**14, r=8, p=1, dklen=32)
        nonce = b"\0" * 12
        data = base64.b64encode(nonce + AESGCM(key).encrypt(nonce, b"a", None)).decode()
        key_id = ONE.seal("a", OWNER).split(":")[1]
        for prefix in ("sealed", "bound"):  # renamed, it still is not bound
            with pytest.raises(ValueError, match=r"put the service again|another service"):
                ONE.open(f"{prefix}:{key_id}:{data}", OWNER)


class TestKeys:
    def test_the_first_key_seals_and_all_of_them_open(self):
        old = Vault(OLD)
        both = Vault(f"{NEW}, {OLD}")
        assert both.open(old.seal("a", OWNER), OWNER) == "a"
        assert ONE.open(both.seal("b", OWNER), OWNER) == "b"
        with pytest.raises(ValueError, match="TICKWHEEL_SECRET_KEY does not have"):
            old.open(both.seal("b", OWNER), OWNER)

    def test_a_missing_key_is_named_by_its_id_and_no_secret_is_shown(self):
        sealed = Vault(OLD).seal("whsec_secret", OWNER)
        with pytest.raises(ValueError, match="was sealed with the key") as raised:
            ONE.open(sealed, OWNER)
        assert "whsec_secret" not in str(raised.value)
        assert sealed.rpartition(":")[2] not in str(raised.value)
        assert sealed.split(":")[1] in str(raised.value)

    def test_without_a_key_a_sealed_secret_stays_closed(self):
        with pytest.raises(ValueError, match="TICKWHEEL_SECRET_KEY"):
            Vault().open(ONE.seal("a", OWNER), OWNER)

    @pytest.mark.parametrize("keys", ["short", f"{NEW},short", "x" * 15, "x,y"])
    def test_a_short_key_is_refused_and_not_shown(self, keys):
        with pytest.raises(ValueError, match="16 characters") as raised:
            Vault(keys)
        assert keys not in str(raised.value)

    @pytest.mark.parametrize("keys", [None, "", "  ", ",", " , "])
    def test_an_empty_key_counts_as_none(self, keys):
        assert Vault(keys).seal("a", OWNER) == "plain:a"

    def test_the_repr_of_a_vault_shows_no_key(self):
        assert NEW not in repr(ONE)
        assert NEW not in str(vars(ONE))


class TestPlain:
    def test_without_a_key_secrets_are_stored_in_plain_text_with_one_warning(self, caplog):
        vault = Vault()
        with caplog.at_level(logging.WARNING, "tickwheel"):
            assert [vault.open(vault.seal(one, OWNER), OWNER) for one in ("a", "bound:b", "")] == [
                "a", "bound:b", "",
            ]  # fmt: skip
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "TICKWHEEL_SECRET_KEY" in record.getMessage()

    def test_with_a_key_plain_secrets_can_still_be_read(self):
        assert ONE.open(Vault().seal("a", OWNER), OWNER) == "a"


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
    def test_a_damaged_secret_is_an_error(self, damage):
        with pytest.raises(ValueError, match="damaged"):
            ONE.open(damage(ONE.seal("whsec_secret", OWNER)), OWNER)

    @pytest.mark.parametrize("text", ["", "whsec_secret", "bound", "bound:", ":", "BOUND:a:b"])
    def test_a_text_that_no_vault_sealed_stays_closed_and_is_not_shown(self, text):
        with pytest.raises(ValueError, match=r"key|damaged") as raised:
            ONE.open(text, OWNER)
        assert "whsec_secret" not in str(raised.value)

    def test_a_change_of_any_byte_is_detected(self):
        text = ONE.seal("a", OWNER)
        head, _, body = text.rpartition(":")
        data = base64.b64decode(body)
        for place in range(len(data)):
            flipped = bytearray(data)
            flipped[place] ^= 1
            with pytest.raises(ValueError, match="damaged"):
                ONE.open(f"{head}:{base64.b64encode(flipped).decode()}", OWNER)
