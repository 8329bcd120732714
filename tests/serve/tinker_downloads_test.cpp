// Files of external weights.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using testing::body_of;
using ::testing::HasSubstr;
using testing::Served;
using testing::status_of;

using Directory = heddle::testing::TemporaryDirectory;

/// A client with external and training weights named w, of a tenant with a key.
class Saver {
 public:
  explicit Saver(Served& served)
      : port_(served.port()), caller_(port_, served.keys().add("ann", "train,sample")) {
    run_ = caller_.create_model(caller_.session()).at("model_id");
    save("save_weights_external", 1);
    save("save_weights", 2);
    save("save_weights_for_sampler", 3);
  }
  void save(const std::string& how, int seq) {
    EXPECT_FALSE(
        caller_
            .wait(caller_.post(
                how, {{"model_id", run_}, {"path", "w"}, {"seq_id", seq}, {"overwrite", true}}))
            .contains("error"));
  }
  std::string checkpoint(const std::string& id) const {
    return "training_runs/" + run_ + "/checkpoints/" + id;
  }
  /// The path and query of the one file's address.
  std::string address() {
    const json told = caller_.get(checkpoint("external_weights/w/external_weights_urls"));
    EXPECT_EQ(caller_.status, 200) << told;
    EXPECT_THAT(told.at("expires").get<std::string>(), HasSubstr("T"));
    const std::string url = told.at("urls").at("weights"), begin = "http://test/";
    EXPECT_TRUE(url.starts_with(begin)) << url;
    return url.substr(begin.size() - 1);
  }
  /// An answer to somebody without a key.
  std::string fetched(const std::string& address) const {
    return testing::Client(port_).ask("GET", address, "");
  }
  ApiClient& caller() { return caller_; }

 private:
  int port_;
  ApiClient caller_;
  std::string run_;
};

TEST(TinkerDownloads, AreGivenToWhoeverHasASignedAddress) {
  const Directory folder;
  Served served(folder.path());
  Saver saver(served);
  const std::string address = saver.address();
  const std::string answer = saver.fetched(address);
  EXPECT_EQ(status_of(answer), 200) << answer;
  EXPECT_EQ(body_of(answer), "1 0") << "the bytes of the file";
  EXPECT_EQ(status_of(saver.fetched(address + "0")), 403) << "another signature";
  EXPECT_EQ(status_of(saver.fetched(address.substr(0, address.find('?')))), 403);
  std::string later = address;
  later.replace(later.find("expires=") + 8, 1, "9");
  EXPECT_EQ(status_of(saver.fetched(later)), 403) << "the time is signed too";
  // Weights that take the name have addresses of their own.
  saver.save("save_weights_external", 4);
  EXPECT_EQ(status_of(saver.fetched(address)), 403);
  const std::string next = saver.address();
  saver.caller().raw("DELETE", saver.checkpoint("external_weights/w"), "");
  EXPECT_EQ(status_of(saver.fetched(next)), 404);
}

TEST(TinkerDownloads, AddressesAreForThoseWhoMayReadExternalWeights) {
  const Directory folder;
  Served served(folder.path());
  Saver saver(served);
  // Clients download external weights: these are for PEFT, the others for this server.
  using tenants::SavedFor;
  EXPECT_THAT(served.backend().saved_for,
              ::testing::ElementsAre(SavedFor::kPeft, SavedFor::kTraining, SavedFor::kSampling));
  const json refused = saver.caller().get(saver.checkpoint("weights/w/external_weights_urls"));
  EXPECT_EQ(saver.caller().status, 400);
  EXPECT_THAT(refused.at("detail").get<std::string>(), HasSubstr("save_weights_external"));
  ApiClient other(served.port(), served.keys().add("bob", "train,sample"));
  other.get(saver.checkpoint("external_weights/w/external_weights_urls"));
  EXPECT_EQ(other.status, 404);
}

}  // namespace
}  // namespace heddle::serve
