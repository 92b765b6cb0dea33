"""Tokens over HTTP: an admin creates, lists and revokes them, in one namespace or in all."""


def wanted(**more):
    return {"name": "n", "scopes": ["read"], "namespace": "*"} | more


class TestTokens:
    def test_a_created_token_works_until_it_is_revoked(self, api):
        admin = api.token("admin")
        made = api.post("/v1/tokens", wanted(lifetime=60), token=admin, status=201).json
        assert made["scopes"] == ["read"]
        assert made["expires_at"] > made["created_at"]
        api.get("/v1/tasks", token=made["token"], status=200)
        listed = api.get("/v1/tokens", token=admin, status=200)
        assert [one["id"] for one in listed.json["items"]][-1] == made["id"]
        assert made["token"].encode() not in listed.body
        api.delete(f"/v1/tokens/{made['id']}", token=admin, status=204)
        api.get("/v1/tasks", token=made["token"]).refused(401, "unauthorized")
        api.delete(f"/v1/tokens/{made['id']}", token=admin).refused(404, "not_found")

    def test_both_are_in_the_audit_log_without_the_secret(self, api):
        admin = api.token("admin", name="boss")
        made = api.post("/v1/tokens", wanted(), token=admin, status=201).json
        api.delete(f"/v1/tokens/{made['id']}", token=admin, status=204)
        log = api.get("/v1/audit", token=admin, status=200)
        lines = [(one["action"], one["target"]) for one in log.json["items"][:2]]
        assert lines == [("token.revoke", made["id"]), ("token.create", made["id"])]
        assert all(one["actor"].endswith(" boss") for one in log.json["items"][:2])
        assert made["token"].rpartition("_")[2].encode() not in log.body

    def test_an_admin_of_a_namespace_has_its_tokens_only(self, api):
        everywhere = api.token("admin")
        shop = api.token("admin", namespace="shop")
        made = api.post("/v1/tokens", wanted(namespace=None), token=shop, status=201).json
        assert made["namespace"] == "shop"
        for namespace in ("*", "other", "default"):
            refused = api.post("/v1/tokens", wanted(namespace=namespace), token=shop)
            refused.refused(403, "forbidden")
        found = {one["namespace"] for one in api.get("/v1/tokens", token=shop).json["items"]}
        assert found == {"shop"}
        other = everywhere.split("_")[1]
        api.delete(f"/v1/tokens/{other}", token=shop).refused(404, "not_found")

    def test_the_first_token_locks_nobody_out(self, api):
        api.post("/v1/tokens", wanted()).refused(422, "invalid")
        api.post("/v1/tokens", wanted(scopes=["admin"], namespace="shop")).refused(422, "invalid")
        api.post("/v1/tokens", wanted(scopes=["admin"]), status=201)
        api.get("/v1/tasks").refused(401, "unauthorized")

    def test_a_name_is_printable(self, api):
        admin = api.token("admin")
        for name in ("", " ", "a\nb", "\x1b[31m", "x" * 201):
            api.post("/v1/tokens", wanted(name=name), token=admin).refused(422, "invalid")


def test_a_revoked_token_leaves_nothing_behind(make_api):
    api = make_api()
    kept = api.token("read", rate=0.01)
    api.get("/v1/tasks", token=kept, status=200)
    for _ in range(5):
        token = api.token("read", rate=1)
        api.get("/v1/tasks", token=token, status=200)
        api.revoke(token)
    api.get("/v1/tasks", token=kept).refused(429, "rate_limited")
    assert [*api.app.guard._buckets] == [kept.split("_")[1]]
