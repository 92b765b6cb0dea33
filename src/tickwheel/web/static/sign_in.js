// The form that asks for a token.

import { signIn } from "./api.js";
import { fill, foreign, h } from "./dom.js";

export function signInPage(then, why = "") {
  const problem = h("p", { class: why ? "banner bad" : "banner bad hidden", role: "alert" }, why);
  const input = h("input", { name: "token", type: "password", autocomplete: "current-password", required: true, placeholder: "tw_…", spellcheck: "false" });
  const button = h("button", { class: "primary", type: "submit" }, "Sign in");
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await signIn(input.value);
      await then(true);
    } catch (error) {
      problem.classList.remove("hidden");
      fill(problem, foreign(error.message));
      input.select();
    } finally {
      button.disabled = false;
    }
  } }, h("label", { class: "field" }, "Token", input), problem, button);
  return h("div", { class: "sign-in" }, h("section", { class: "card" }, h("h1", {}, "Sign in"),
    h("p", { class: "soft small" }, "This server needs a token. ", h("code", {}, "tickwheel tokens create"), " makes one; with the scope read it shows everything, with admin it may change everything."), form));
}
