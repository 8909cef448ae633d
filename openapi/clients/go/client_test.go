package redlock

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

func TestWhatCannotWorkIsNamedAndNoSecretWithIt(t *testing.T) {
	for _, wrong := range []string{"localhost:8080", "ftp://a", "http://user:secret@a", "http://secret@a:b", "http://a/?b", ""} {
		_, err := New(Config{URLs: []string{wrong}})
		if !errors.As(err, new(*SetupError)) || !strings.Contains(err.Error(), "is not a URL") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	if _, err := New(Config{}); err == nil || !strings.Contains(err.Error(), "http://127.0.0.1:8080") {
		t.Error(err)
	}
	if _, err := New(Config{URLs: []string{"http://a"}, Key: "secret\nkey"}); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
	client, err := New(Config{URLs: []string{"http://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", ".", ".."} {
		if _, err := client.Lock(context.Background(), name); !errors.As(err, new(*SetupError)) {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, margin := range []time.Duration{-time.Second, 500 * time.Millisecond, time.Second, math.MaxInt64} {
		_, err := client.Lock(context.Background(), "a", TTL(time.Second), Margin(margin))
		if !errors.As(err, new(*SetupError)) || !strings.Contains(err.Error(), margin.String()) ||
			!strings.Contains(err.Error(), "less than half of the TTL of 1s") {
			t.Error(err)
		}
	}
}

func TestANameIsOneSegmentOfThePathBelowThatOfTheGateway(t *testing.T) {
	for name, path := range map[string]string{
		"reports/nightly+a@b:c~d": "/team/locks/reports%2Fnightly+a@b:c~d",
		"../livez?x#y %2F é":      "/team/locks/..%2Flivez%3Fx%23y%20%252F%20%C3%A9",
	} {
		request, err := api.NewGetLockRequest("http://a/team/", name, nil)
		if err != nil || request.URL.EscapedPath() != path {
			t.Errorf("%v: %v", request.URL, err)
		}
	}
}

func TestADeadlineCountsFromTheMomentOfSending(t *testing.T) {
	sent := now().add(-7 * time.Second)
	if _, deadline := validity(29_000, 5_000, sent, 30*time.Second); deadline.since(sent) != 34*time.Second {
		t.Error(deadline.since(sent))
	}
	if _, deadline := validity(1<<30, 1<<62, sent, 30*time.Second); deadline.since(sent) > 38*time.Second {
		t.Error(deadline.since(sent))
	}
}

func TestASetMayBeTrustedUntilItsFirstDeadline(t *testing.T) {
	sent, one, two := now().add(-time.Second), int64(1), int64(2)
	leases := []api.Lease{
		{ValidityMs: 9_000, ElapsedMs: 100, Waiters: &one},
		{ValidityMs: 8_000, ElapsedMs: 200, Waiters: &two},
		{ValidityMs: 9_000},
	}
	validity, deadline, waiters := validityOfAll(leases, sent, time.Minute)
	if validity != 8*time.Second || deadline.since(sent) != 8200*time.Millisecond || *waiters != 3 {
		t.Error(validity, deadline.since(sent), *waiters)
	}
}

func TestWhatMayGoWellTheNextTimeIsToldFromWhatMayNot(t *testing.T) {
	answer := func(status int, after, body string) *failure {
		response := &http.Response{StatusCode: status, Header: http.Header{"Retry-After": {after}}}
		return refusal("http://a/", response, []byte(body))
	}
	problem := `{"type":"t","title":"t","status":1,"detail":"d","retry_after_ms":7,"code":"c"}`
	page := "<html>"
	for _, each := range []struct {
		failure *failure
		pause   time.Duration
		again   bool
	}{
		{answer(503, "9", problem), 7 * time.Millisecond, true},
		{answer(429, "9", problem), 7 * time.Millisecond, true},
		{answer(500, "9", problem), 0, true},
		{answer(400, "9", problem), 0, false},
		{answer(409, "9", problem), 0, false},
		{answer(502, "9", page), 9 * time.Second, true},
		{answer(504, "", page), 0, true},
		{answer(404, "", page), 0, false},
		{answer(302, "", page), 0, false},
	} {
		if pause, again := each.failure.pause(); pause != each.pause || again != each.again {
			t.Errorf("%v: %v, %v", each.failure, pause, again)
		}
	}
	if answer(404, "", page).problem.isLoss() || answer(409, "", page).problem.isLoss() {
		t.Error("a proxy's page is no word of a gateway")
	}
}
