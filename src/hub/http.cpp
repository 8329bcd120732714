#include "hub/http.h"

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <thread>

#include "base/text.h"
#include "hub/environment.h"

namespace heddle::hub {
namespace {

/// A request that fails this often without getting a byte further is given up.
constexpr int kAttempts = 5;
constexpr double kFirstPauseSeconds = 0.25;
/// Longest wait that a busy server may ask for with Retry-After.
constexpr double kLongestPauseSeconds = 60;
constexpr long kConnectSeconds = 15;
/// A transfer of less than a byte a second for so long has died.
constexpr long kSilentSeconds = 30;
/// A list of files; more is no answer of a hub.
constexpr std::size_t kLongestBody = std::size_t{64} << 20;

void start_curl() {
  static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (started != CURLE_OK)
    throw_error<Error>("libcurl cannot start: {}", curl_easy_strerror(started));
}

/// One transfer as libcurl sees it.
struct Transfer {
  std::map<std::string, std::string> headers;
  long status = 0;
  std::string body;
  std::string trouble;  ///< why a write failed
  int file = -1;        ///< the body goes here instead
  std::uint64_t begin = 0, written = 0;
  std::uint64_t most = 0;  ///< bytes of the file, no more of which are written
  bool is_longer = false;  ///< more came than may come
  const std::function<bool(std::uint64_t)>* on_bytes = nullptr;
};

std::size_t on_header(char* data, std::size_t size, std::size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::string_view line(data, size * count);
  if (line.starts_with("HTTP/")) transfer.headers.clear();  // of a redirection before
  const std::size_t colon = line.find(':');
  if (colon != std::string_view::npos) {
    std::string name(line.substr(0, colon));
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    transfer.headers[name] = std::string(text::trim(line.substr(colon + 1)));
  }
  return size * count;
}

struct Easy {
  CURL* handle = curl_easy_init();
  curl_slist* headers = nullptr;
  ~Easy() {
    curl_slist_free_all(headers);
    curl_easy_cleanup(handle);
  }
};

std::size_t on_body(char* data, std::size_t size, std::size_t count, void* user) {
  auto& [transfer, easy] = *static_cast<std::pair<Transfer*, Easy*>*>(user);
  const std::size_t bytes = size * count;
  curl_easy_getinfo(easy->handle, CURLINFO_RESPONSE_CODE, &transfer->status);
  const bool is_success = transfer->status == 200 || transfer->status == 206;
  if (transfer->file < 0 || !is_success) {
    if (transfer->body.size() + bytes > kLongestBody) {
      transfer->is_longer = true;
      return 0;
    }
    transfer->body.append(data, bytes);
    return bytes;
  }
  // The whole file although a part was asked for: what is there already is of no use.
  if (transfer->status == 200 && transfer->begin > 0 && transfer->written == 0) {
    if (ftruncate(transfer->file, 0) != 0) return 0;
    lseek(transfer->file, 0, SEEK_SET);
    transfer->begin = 0;
  }
  if (transfer->begin + transfer->written + bytes > transfer->most) {
    transfer->is_longer = true;  // maybe without end: the disk is not to be filled
    return 0;
  }
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t put = write(transfer->file, data + done, bytes - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      transfer->trouble = strerror(errno);
      return 0;
    }
    done += static_cast<std::size_t>(put);
  }
  transfer->written += bytes;
  if ((*transfer->on_bytes)(transfer->begin + transfer->written)) return bytes;
  transfer->trouble = "another file failed";
  return 0;
}

class Descriptor {
 public:
  explicit Descriptor(const files::Path& path)
      : value_(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644)) {
    if (value_ < 0) throw_error<FileError>("cannot open {}: {}", path.string(), strerror(errno));
  }
  ~Descriptor() { close(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  std::uint64_t seek_end() const { return static_cast<std::uint64_t>(lseek(value_, 0, SEEK_END)); }

 private:
  int value_;
};

/// The text whose %XX are the bytes that they stand for.
std::string unescaped(const std::string& text) {
  int bytes = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(
      curl_easy_unescape(nullptr, text.c_str(), static_cast<int>(text.size()), &bytes), curl_free);
  return {plain.get(), static_cast<std::size_t>(bytes)};
}

/// Proof of who asks, for the hub alone: no other address gets it.
struct Credentials {
  std::string token, user;
};

bool is_temporary(long status) { return status == 408 || status == 429 || status >= 500; }

/// A name that is not there or a server that does not listen stays so for a while.
bool is_lasting(CURLcode code) {
  return code == CURLE_COULDNT_RESOLVE_HOST || code == CURLE_COULDNT_RESOLVE_PROXY ||
         code == CURLE_COULDNT_CONNECT || code == CURLE_UNSUPPORTED_PROTOCOL ||
         code == CURLE_URL_MALFORMAT || code == CURLE_PEER_FAILED_VERIFICATION;
}

void pause_before(int attempt, const Transfer& last) {
  double seconds = kFirstPauseSeconds * (1 << std::min(attempt, 6));
  const auto asked = last.headers.find("retry-after");
  if (asked != last.headers.end())
    seconds = std::max(seconds, std::strtod(asked->second.c_str(), nullptr));
  std::this_thread::sleep_for(
      std::chrono::duration<double>(std::min(seconds, kLongestPauseSeconds)));
}

}  // namespace

Http::Http(Hub hub)
    : hub_(hub),
      endpoint_(endpoint(hub)),
      user_(unescaped(endpoint_user(hub))),
      token_(token(hub)),
      certificates_(certificate_file()) {
  start_curl();
}

namespace {

/// Makes one transfer; the code is CURLE_OK for any answer of the server.
CURLcode perform(const std::string& url, const Credentials& credentials,
                 const std::string& certificates, Transfer& transfer) {
  Easy easy;
  if (easy.handle == nullptr) throw Error("libcurl has no memory");
  const auto set = [&](CURLoption option, auto value) {
    curl_easy_setopt(easy.handle, option, value);
  };
  if (!credentials.token.empty())
    easy.headers =
        curl_slist_append(nullptr, ("Authorization: Bearer " + credentials.token).c_str());
  if (!credentials.user.empty()) set(CURLOPT_USERPWD, credentials.user.c_str());
  std::pair<Transfer*, Easy*> user{&transfer, &easy};
  set(CURLOPT_URL, url.c_str());
  set(CURLOPT_HTTPHEADER, easy.headers);
  set(CURLOPT_USERAGENT, "heddle");
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  set(CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
  set(CURLOPT_FOLLOWLOCATION, 1L);
  set(CURLOPT_MAXREDIRS, 8L);
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);
  set(CURLOPT_LOW_SPEED_TIME, kSilentSeconds);
  if (!certificates.empty()) set(CURLOPT_CAINFO, certificates.c_str());
  const std::string range = std::to_string(transfer.begin) + "-";
  if (transfer.begin > 0) set(CURLOPT_RANGE, range.c_str());
  set(CURLOPT_HEADERFUNCTION, on_header);
  set(CURLOPT_HEADERDATA, &transfer);
  set(CURLOPT_WRITEFUNCTION, on_body);
  set(CURLOPT_WRITEDATA, &user);
  const CURLcode code = curl_easy_perform(easy.handle);
  curl_easy_getinfo(easy.handle, CURLINFO_RESPONSE_CODE, &transfer.status);
  return code;
}

/// The server's own words, which the Hugging Face Hub puts into a header.
std::string words_of(const Transfer& transfer) {
  const auto message = transfer.headers.find("x-error-message");
  return message == transfer.headers.end() ? "" : ": " + message->second;
}

}  // namespace

Response Http::get(const std::string& url) const {
  const bool is_hub = url.starts_with(endpoint_ + "/");
  const Credentials credentials = is_hub ? Credentials{token_, user_} : Credentials{};
  for (int attempt = 0;; ++attempt) {
    Transfer transfer;
    const CURLcode code = perform(url, credentials, certificates_, transfer);
    if (transfer.is_longer)
      throw HttpError(0, fmt::format("{}: the answer has more than {} bytes", url, kLongestBody));
    if (code == CURLE_OK && transfer.status == 200)
      return {std::move(transfer.headers), std::move(transfer.body)};
    const bool is_over = code == CURLE_OK ? !is_temporary(transfer.status) : is_lasting(code);
    if (is_over || attempt + 1 == kAttempts) {
      if (code != CURLE_OK)
        throw HttpError(0, fmt::format("{}: {}", url, curl_easy_strerror(code)));
      throw HttpError(transfer.status, fmt::format("{}: HTTP status {}{}", url, transfer.status,
                                                   words_of(transfer)));
    }
    pause_before(attempt, transfer);
  }
}

void Http::download(const std::string& url, const files::Path& file, std::uint64_t bytes,
                    const std::function<bool(std::uint64_t)>& on_bytes) const {
  const bool is_hub = url.starts_with(endpoint_ + "/");
  const Credentials credentials = is_hub ? Credentials{token_, user_} : Credentials{};
  const Descriptor descriptor(file);
  std::uint64_t farthest = descriptor.seek_end();
  for (int attempt = 0;; ++attempt) {
    Transfer transfer;
    transfer.file = descriptor.get();
    transfer.begin = descriptor.seek_end();
    transfer.on_bytes = &on_bytes;
    transfer.most = bytes;
    if (transfer.begin == bytes) break;
    if (transfer.begin > bytes) {
      if (ftruncate(descriptor.get(), 0) != 0)
        throw_error<FileError>("cannot cut {}: {}", file.string(), strerror(errno));
      transfer.begin = descriptor.seek_end();
    }
    const CURLcode code = perform(url, credentials, certificates_, transfer);
    if (!transfer.trouble.empty())
      throw_error<FileError>("cannot write {}: {}", file.string(), transfer.trouble);
    if (transfer.is_longer) {
      std::error_code ignored;
      std::filesystem::remove(file, ignored);
      throw HttpError(0, fmt::format("{}: sends more than the {} bytes that the hub announces; a "
                                     "mirror or proxy may change it: nothing of it was kept",
                                     url, bytes));
    }
    const bool is_success = transfer.status == 200 || transfer.status == 206;
    if (code == CURLE_OK && is_success && descriptor.seek_end() == bytes) break;
    if (const std::uint64_t end = descriptor.seek_end(); end > farthest) {
      farthest = end;
      attempt = -1;  // it goes on
    }
    const bool is_over =
        code == CURLE_OK ? !is_success && !is_temporary(transfer.status) && transfer.status != 416
                         : is_lasting(code);
    if (is_over || attempt + 1 >= kAttempts) {
      if (code != CURLE_OK)
        throw HttpError(0, fmt::format("{}: {}", url, curl_easy_strerror(code)));
      if (is_success) {
        throw HttpError(
            0, fmt::format("{}: ends after {} of {} bytes", url, descriptor.seek_end(), bytes));
      }
      throw HttpError(transfer.status, fmt::format("{}: HTTP status {}{}", url, transfer.status,
                                                   words_of(transfer)));
    }
    if (transfer.status == 416 && ftruncate(descriptor.get(), 0) != 0)
      throw_error<FileError>("cannot cut {}: {}", file.string(), strerror(errno));
    if (attempt >= 0) pause_before(attempt, transfer);
  }
  if (fsync(descriptor.get()) != 0)
    throw_error<FileError>("cannot write {}: {}", file.string(), strerror(errno));
}

std::string url_escape(const std::string& text) {
  std::string escaped;
  for (const unsigned char c : text) {
    if (std::isalnum(c) != 0 ||
        std::string_view("-_.~/").find(static_cast<char>(c)) != std::string_view::npos) {
      escaped += static_cast<char>(c);
    } else {
      escaped += fmt::format("%{:02X}", c);
    }
  }
  return escaped;
}

}  // namespace heddle::hub
