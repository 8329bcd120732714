#pragma once

#include <functional>
#include <map>
#include <string>

#include "serve/admin/state.h"
#include "serve/http/server.h"

namespace heddle::serve::admin {

/// The page of a server for those who run it: /admin, and /admin/state.json for programs. It shows
/// and changes nothing.
class Admin {
 public:
  /// `identify`: who a request is of, as the server's other routes ask; throws HttpError 401.
  Admin(Server& server, Sources sources, std::function<Caller(const Request&)> identify);

  /// Adds the routes. The object outlives the server.
  void serve();

 private:
  void tick();
  /// The request has a key with the scope admin, or the cookie of a login with one.
  bool is_admin(const Request& request);
  bool has_admin_key(const Request& request) const;
  void login(const Request& request, const Responder& responder);
  void logout(const Request& request, const Responder& responder);
  void show(const Request& request, const Responder& responder);

  struct Login {
    std::string key;  ///< Asked about anew each time: it may be revoked.
    double until;
  };
  Server& server_;
  State state_;
  std::function<Caller(const Request&)> identify_;
  std::map<std::string, Login> logins_;  ///< By the hash of the cookie.
};

}  // namespace heddle::serve::admin
