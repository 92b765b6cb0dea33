"""Signatures: an implementation that is not ours accepts what we sign, and signs what we accept."""

import base64
import hashlib
import hmac
import time
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import WebhookVerificationError

from tickwheel.errors import TickwheelError
from tickwheel.values import signature
from tickwheel.values.signature import (
    InvalidSignature,
    check_secret,
    new_secret,
    sign,
    verify,
)

OLD, NEW, OTHER = ("whsec_" + base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2, 3))
NOW = 1_800_000_000
BODY = '{"order": "o-1", "für": [1, 2.50]}'.encode()


def signed(secrets, body=BODY, *, at=NOW, message_id="task-1"):
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": sign(secrets, message_id, at, body),
    }


class TestAgainstThePublicPackage:
    def test_what_we_sign_it_verifies(self):
        headers = signed([NEW], at=int(time.time()))
        parsed = standardwebhooks.Webhook(NEW).verify(BODY, headers)
        assert parsed == {"order": "o-1", "für": [1, 2.5]}

    @pytest.mark.parametrize("known", [OLD, NEW])
    def test_while_a_secret_is_replaced_it_verifies_with_either(self, known):
        headers = signed([NEW, OLD], at=int(time.time()))
        standardwebhooks.Webhook(known).verify(BODY, headers)

    def test_it_refuses_what_we_signed_with_another_secret(self):
        headers = signed([NEW, OLD], at=int(time.time()))
        with pytest.raises(WebhookVerificationError):
            standardwebhooks.Webhook(OTHER).verify(BODY, headers)

    def test_it_refuses_a_body_that_was_changed(self):
        headers = signed([NEW], at=int(time.time()))
        with pytest.raises(WebhookVerificationError):
            standardwebhooks.Webhook(NEW).verify(BODY + b" ", headers)

    @pytest.mark.parametrize("secrets", [[OLD], [NEW, OLD], [OTHER, NEW, OLD]])
    def test_what_it_signs_we_verify(self, secrets):
        theirs = standardwebhooks.Webhook(OLD).sign(
            "task-1", datetime.fromtimestamp(NOW, UTC), BODY.decode()
        )
        headers = signed([OLD]) | {"webhook-signature": theirs}
        assert verify(secrets, headers, BODY, now=NOW) == "task-1"

    @given(
        key=st.binary(min_size=24, max_size=64),
        message_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
        at=st.integers(0, 2**33),
        body=st.text(),
    )
    def test_both_make_the_same_signature_of_anything(self, key, message_id, at, body):
        secret = "whsec_" + base64.b64encode(key).decode()
        theirs = standardwebhooks.Webhook(secret).sign(
            message_id, datetime.fromtimestamp(at, UTC), body
        )
        assert sign([secret], message_id, at, body.encode()) == theirs

    def test_it_takes_the_secrets_that_we_make(self):
        secret = new_secret()
        headers = signed([secret], at=int(time.time()))
        standardwebhooks.Webhook(secret).verify(BODY, headers)


class TestSign:
    def test_it_is_the_hmac_of_id_time_and_body(self):
        key = b"\x02" * 32
        mac = hmac.new(key, b"task-1.1800000000." + BODY, hashlib.sha256).digest()
        assert sign([NEW], "task-1", NOW, BODY) == "v1," + base64.b64encode(mac).decode()

    def test_there_is_one_signature_per_secret_in_their_order(self):
        both = sign([NEW, OLD], "task-1", NOW, BODY)
        alone = [sign([one], "task-1", NOW, BODY) for one in (NEW, OLD)]
        assert both == " ".join(alone)

    def test_without_a_secret_there_is_none(self):
        assert sign([], "task-1", NOW, BODY) == ""

    def test_a_body_need_not_be_text(self):
        body = bytes(range(256))
        verify([NEW], signed([NEW], body), body, now=NOW)

    def test_the_key_is_prepared_once_per_secret(self):
        signature._hmac.cache_clear()
        for number in range(5):
            sign([NEW, OLD], f"task-{number}", NOW, BODY)
        assert signature._hmac.cache_info().misses == 2

    def test_a_secret_that_is_none_signs_nothing(self):
        with pytest.raises(ValueError, match="does not start with"):
            sign(["hunter2"], "task-1", NOW, BODY)


class TestVerify:
    def test_it_returns_the_id(self):
        assert verify([NEW], signed([NEW]), BODY, now=NOW) == "task-1"

    def test_headers_may_be_pairs_and_names_in_capitals(self):
        pairs = [(name.title(), value) for name, value in signed([NEW]).items()]
        assert verify([NEW], [("Host", "h"), *pairs], BODY, now=NOW) == "task-1"

    @pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
    @pytest.mark.parametrize("value", [None, ""])
    def test_a_header_that_is_missing_is_named(self, name, value):
        headers = signed([NEW])
        del headers[name]
        if value is not None:
            headers[name] = value
        with pytest.raises(InvalidSignature, match=f"{name} is missing"):
            verify([NEW], headers, BODY, now=NOW)

    def test_a_header_that_came_twice_with_two_values_is_refused(self):
        pairs = [*signed([NEW]).items(), ("webhook-id", "task-2")]
        with pytest.raises(InvalidSignature, match="webhook-id came twice"):
            verify([NEW], pairs, BODY, now=NOW)

    @pytest.mark.parametrize(
        "change",
        [
            {"webhook-id": "task-2"},
            {"webhook-timestamp": str(NOW + 1)},
            {"webhook-timestamp": f"0{NOW}"},
            {"webhook-signature": "v1,"},
            {"webhook-signature": "v1"},
            {"webhook-signature": "nonsense"},
            {"webhook-signature": "v1,ö"},
            {"webhook-signature": "v1,\ud800"},
            {"webhook-id": "\ud800\udcff"},
        ],
        ids=repr,
    )
    def test_what_was_changed_or_is_garbage_is_refused(self, change):
        with pytest.raises(InvalidSignature, match="no signature by a known secret"):
            verify([NEW], signed([NEW]) | change, BODY, now=NOW)

    def test_a_signature_of_another_version_does_not_count(self):
        headers = signed([NEW])
        headers["webhook-signature"] = headers["webhook-signature"].replace("v1,", "v2,")
        with pytest.raises(InvalidSignature, match="no signature by a known secret"):
            verify([NEW], headers, BODY, now=NOW)

    def test_beside_others_the_right_signature_counts(self):
        headers = signed([NEW])
        headers["webhook-signature"] = "v1a,xyz  nonsense v1,AAAA " + headers["webhook-signature"]
        assert verify([OTHER, NEW], headers, BODY, now=NOW) == "task-1"

    def test_a_changed_body_is_refused(self):
        with pytest.raises(InvalidSignature):
            verify([NEW], signed([NEW]), BODY.replace(b"o-1", b"o-2"), now=NOW)

    @pytest.mark.parametrize("stamp", ["-5", "1e9", "1800000000.0", "٣", " 1800000000", "9" * 400])
    def test_a_time_that_is_no_whole_number_is_refused(self, stamp):
        headers = signed([NEW]) | {"webhook-timestamp": stamp}
        with pytest.raises(InvalidSignature, match="must be whole seconds"):
            verify([NEW], headers, BODY, now=NOW)

    @pytest.mark.parametrize("off", [-300, 0, 300])
    def test_a_time_within_the_tolerance_is_accepted(self, off):
        assert verify([NEW], signed([NEW], at=NOW + off), BODY, now=NOW)

    @pytest.mark.parametrize(("off", "word"), [(-301, "too old: 301 s"), (301, "too new: 301 s")])
    def test_a_time_beyond_it_is_refused_and_says_by_how_much(self, off, word):
        with pytest.raises(InvalidSignature, match=word):
            verify([NEW], signed([NEW], at=NOW + off), BODY, now=NOW)

    def test_the_tolerance_can_be_chosen(self):
        headers = signed([NEW], at=NOW - 11)
        assert verify([NEW], headers, BODY, now=NOW, tolerance=11)
        with pytest.raises(InvalidSignature):
            verify([NEW], headers, BODY, now=NOW, tolerance=10)

    @pytest.mark.parametrize("known", [[OTHER, OLD], [NEW, OTHER]])
    def test_all_signatures_are_compared_in_constant_time(self, known, monkeypatch):
        compare = Mock(wraps=hmac.compare_digest)
        monkeypatch.setattr(hmac, "compare_digest", compare)
        verify(known, signed([OLD, NEW]), BODY, now=NOW)
        assert compare.call_count == 4

    def test_without_secrets_nothing_can_be_verified(self):
        with pytest.raises(ValueError, match="needs at least one secret"):
            verify([], signed([NEW]), BODY, now=NOW)

    def test_the_error_is_one_of_ours_with_a_code(self):
        assert issubclass(InvalidSignature, TickwheelError)
        assert InvalidSignature.code == "invalid_signature"


class TestSecrets:
    @pytest.mark.parametrize("size", [24, 25, 32, 63, 64])
    def test_24_to_64_bytes_will_do(self, size):
        check_secret("whsec_" + base64.b64encode(bytes(size)).decode())

    @pytest.mark.parametrize("size", [0, 1, 23, 65, 1000])
    def test_fewer_or_more_will_not(self, size):
        with pytest.raises(ValueError, match=f"24 to 64 random bytes; this one has {size} bytes"):
            check_secret("whsec_" + base64.b64encode(bytes(size)).decode())

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "********",
            "hunter2hunter2",
            "whsec-" + "A" * 32,
            "WHSEC_" + "A" * 32,
            "whsec_" + "A" * 33,
            "whsec_" + "ö" * 32,
            "whsec_hunter2!" + "A" * 32,
            "whsec_hunter2 " + "A" * 32,
        ],
    )
    def test_a_bad_one_is_told_what_would_be_right_and_never_shown(self, text):
        with pytest.raises(ValueError, match="a secret must be 'whsec_' and the base64") as refused:
            check_secret(text)
        assert "hunter2" not in str(refused.value)
        assert "AAAA" not in str(refused.value)
        assert refused.value.__cause__ is None
        assert refused.value.__suppress_context__ or refused.value.__context__ is None

    @pytest.mark.parametrize("value", [None, 7, b"whsec_"])
    def test_what_is_no_text_is_a_type_error(self, value):
        with pytest.raises(TypeError, match="must be a str"):
            check_secret(value)

    def test_a_new_one_is_right_and_never_the_same(self):
        made = {new_secret() for _ in range(100)}
        assert len(made) == 100
        for secret in made:
            check_secret(secret)
