#include "base/secret.h"

#include <gtest/gtest.h>

namespace heddle::text {
namespace {

TEST(Secret, NoPasswordOfAUrlIsShown) {
  for (const auto& [url, shown] : {
           std::pair{"https://ann:pw@hub.example/api", "https://(hidden)@hub.example/api"},
           std::pair{"http://token@host:8000", "http://(hidden)@host:8000"},
           std::pair{"https://ann:p@w@host/a@b", "https://(hidden)@host/a@b"},
           std::pair{"https://ann:pw@host?q=1@2", "https://(hidden)@host?q=1@2"},
           std::pair{"https://@host", "https://host"},
           std::pair{"https://host/a@b", "https://host/a@b"},
           std::pair{"ann:pw@host", "ann:pw@host"},
           std::pair{"", ""},
       })
    EXPECT_EQ(without_password(url), shown) << url;
}

}  // namespace
}  // namespace heddle::text
