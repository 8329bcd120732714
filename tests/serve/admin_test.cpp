// The page of a server: who sees it, what it shows, and that nothing in it is markup of a client.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/html.h"
#include "serve/admin/html.h"
#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using testing::body_of;
using testing::Client;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Served;
using testing::status_of;
using Directory = heddle::testing::TemporaryDirectory;

constexpr const char* kHostile = "</td><script>alert(1)</script><img src=x onerror='alert(2)'>\"&";

class AdminPage : public ::testing::Test {
 protected:
  AdminPage() : served_(folder_.path()) {}

  std::string get(const std::string& path, const std::string& headers = "") const {
    return Client(served_.port()).ask("GET", path, "", headers);
  }
  std::string post_form(const std::string& path, const std::string& form,
                        const std::string& headers = "") const {
    return Client(served_.port())
        .ask("POST", path, form, "Content-Type: application/x-www-form-urlencoded\r\n" + headers);
  }
  /// The Cookie header that a login's answer asks for.
  static std::string cookie_of(const std::string& answer) {
    const std::size_t first = answer.find("Set-Cookie: ") + 12;
    return "Cookie: other=1; " + answer.substr(first, answer.find(';', first) - first) + "\r\n";
  }

  Directory folder_;
  Served served_;
};

TEST_F(AdminPage, ShowsRunsAndCurvesAndEscapesNames) {
  ApiClient caller(served_.port());
  const std::string session =
      caller.post("create_session", {{"tags", json::array()}, {"display_name", kHostile}})
          .at("session_id");
  const std::string run = caller.create_model(session, 0, 9).at("model_id");
  for (int step = 0; step < 3; ++step) {
    caller.post("forward_backward", ApiClient::work(run, 2 * step + 1, {5, 6 + step}));
    caller.wait(caller.post("optim_step", ApiClient::step(run, 2 * step + 2)));
  }
  const json state = json::parse(body_of(get("/admin/state.json")));
  ASSERT_EQ(state["runs"].size(), 1);
  const json& shown = state["runs"][0];
  EXPECT_EQ(shown["run"], run);
  EXPECT_EQ(shown["rank"], 9);
  EXPECT_EQ(shown["steps"], 3);
  EXPECT_EQ(shown["tokens"], 6);
  EXPECT_EQ(shown["session_name"], kHostile);
  ASSERT_EQ(shown["loss"].size(), 3);
  EXPECT_EQ(shown["loss"][0], 6.5) << "targets 5 and 6 of a fresh set";
  EXPECT_EQ(state["adapters"], json::array({"adapter"}));
  EXPECT_EQ(state["tenants"][0]["tokens"], 6);

  const std::string page = get("/admin");
  EXPECT_EQ(status_of(page), 200);
  EXPECT_THAT(page, HasSubstr(run));
  EXPECT_THAT(page, HasSubstr("<polyline"));
  EXPECT_THAT(page, HasSubstr("&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x "
                              "onerror=&#39;alert(2)&#39;&gt;&quot;&amp;"));
  EXPECT_THAT(page, Not(HasSubstr("<script>")));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(get("/"), HasSubstr("Location: /admin"));
}

TEST_F(AdminPage, LoadsNothingFromElsewhere) {
  const std::string page = get("/admin");
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'self'; "
                              "style-src 'self'; connect-src 'self'; form-action 'self'; base-uri "
                              "'none'; frame-ancestors 'none'\r\n"));
  for (const char* path : {"/admin", "/admin/script.js", "/admin/style.css"}) {
    const std::string answer = get(path);
    EXPECT_EQ(status_of(answer), 200) << path;
    EXPECT_THAT(body_of(answer), Not(HasSubstr("//www"))) << path;
    EXPECT_THAT(body_of(answer), Not(HasSubstr("http"))) << path;
    EXPECT_THAT(body_of(answer), Not(HasSubstr("style="))) << path;
  }
}

TEST_F(AdminPage, AsksForAKeyAndNeverShowsOne) {
  const std::string admin = served_.keys().add("ann", "train,admin"),
                    other = served_.keys().add("bob", "train,sample", {{"max_runs", 2}});
  for (const char* path : {"/admin/content", "/admin/state.json"})
    EXPECT_EQ(status_of(get(path)), 401) << path;
  EXPECT_EQ(status_of(get("/admin")), 401);
  EXPECT_THAT(get("/admin"), HasSubstr("type='password'"));
  EXPECT_THAT(get("/admin"), Not(HasSubstr("<table")));
  EXPECT_EQ(status_of(get("/admin/state.json", "X-API-Key: " + other + "\r\n")), 401);
  EXPECT_EQ(status_of(post_form("/admin/login", "key=" + other)), 401);
  EXPECT_EQ(status_of(post_form("/admin/login", "key=%zz")), 401);

  const std::string login = post_form("/admin/login", "x=1&key=" + admin);
  EXPECT_EQ(status_of(login), 303);
  EXPECT_THAT(login, HasSubstr("Path=/admin; HttpOnly; SameSite=Strict"));
  EXPECT_THAT(login, Not(HasSubstr("Secure")));
  EXPECT_THAT(post_form("/admin/login", "key=" + admin, "X-Forwarded-Proto: https\r\n"),
              HasSubstr("; Secure"));
  const std::string cookie = cookie_of(login);
  const std::string page = get("/admin", cookie),
                    state = get("/admin/state.json", "X-API-Key: " + admin + "\r\n");
  EXPECT_EQ(status_of(page), 200);
  EXPECT_EQ(status_of(state), 200);
  for (const std::string& secret : {admin, other}) {
    EXPECT_THAT(page, HasSubstr(secret.substr(0, 12)));
    EXPECT_THAT(page, Not(HasSubstr(secret.substr(0, 13))));
    EXPECT_THAT(state, Not(HasSubstr(secret.substr(0, 13))));
  }
  EXPECT_THAT(page, HasSubstr("max_runs=2"));
  EXPECT_EQ(status_of(get("/admin", "Cookie: heddle_admin=guess\r\n")), 401);

  served_.keys().revoke(admin.substr(0, 12));
  EXPECT_EQ(status_of(get("/admin/content", cookie)), 401) << "the login's key was revoked";
}

TEST_F(AdminPage, LogoutEndsTheLogin) {
  const std::string admin = served_.keys().add("ann", "admin");
  const std::string cookie = cookie_of(post_form("/admin/login", "key=" + admin));
  EXPECT_EQ(status_of(get("/admin", cookie)), 200);
  EXPECT_THAT(post_form("/admin/logout", "", cookie), HasSubstr("Max-Age=0"));
  EXPECT_EQ(status_of(get("/admin", cookie)), 401);
}

TEST(Escaped, LeavesNoMarkup) {
  EXPECT_EQ(escape_html("a<b>'\"&\x01\n"), "a&lt;b&gt;&#39;&quot;&amp;?\n");
}

}  // namespace
}  // namespace heddle::serve
