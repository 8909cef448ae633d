package redlock_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

// patience is how long a test waits for an event: as long as all tests may take. It ends a test that
// hangs, and never a test on a slow machine.
const patience = 20 * time.Minute

// servers are three masters, two gateways over them, a proxy that loses answers, and a gateway that wants a key.
type servers struct {
	t        *testing.T
	orders   io.WriteCloser
	answers  *bufio.Scanner
	Gateways []string `json:"gateways"`
	Proxy    string   `json:"proxy"`
	Keyed    string   `json:"keyed"`
	Key      string   `json:"key"`
}

func start(t *testing.T) *servers {
	t.Helper()
	gateway := os.Getenv("REDLOCK_GATEWAY")
	if gateway == "" {
		t.Skip("REDLOCK_GATEWAY is not set: the path of a built redlock-gateway")
	}
	script := filepath.FromSlash("../../../tests/clients/servers.py")
	command := exec.Command("python3", "-B", script, gateway)
	command.Stderr = os.Stderr
	orders, err := command.StdinPipe()
	must(t, err)
	answers, err := command.StdoutPipe()
	must(t, err)
	must(t, command.Start())
	t.Cleanup(func() {
		orders.Close()
		_ = command.Wait()
	})
	s := &servers{t: t, orders: orders, answers: bufio.NewScanner(answers)}
	s.read(s)
	return s
}

func (s *servers) read(into any) {
	s.t.Helper()
	if !s.answers.Scan() {
		s.t.Fatalf("the servers have ended: %v", s.answers.Err())
	}
	must(s.t, json.Unmarshal(s.answers.Bytes(), into))
}

// do gives an order, and returns when it is done.
func (s *servers) do(what string, values map[string]int) {
	s.t.Helper()
	order := map[string]any{"do": what}
	for key, value := range values {
		order[key] = value
	}
	line, err := json.Marshal(order)
	must(s.t, err)
	_, err = s.orders.Write(append(line, '\n'))
	must(s.t, err)
	var answer struct{ Error string }
	s.read(&answer)
	if answer.Error != "" {
		s.t.Fatal(answer.Error)
	}
}

// client is of these URLs, or of all gateways.
func (s *servers) client(urls ...string) *redlock.Client {
	s.t.Helper()
	if len(urls) == 0 {
		urls = s.Gateways
	}
	client, err := redlock.New(redlock.Config{URLs: urls})
	must(s.t, err)
	return client
}

func (s *servers) plain(index int) *api.ClientWithResponses {
	s.t.Helper()
	client, err := api.NewClientWithResponses(s.Gateways[index])
	must(s.t, err)
	return client
}

// look is what a gateway says of a lock. A busy machine looks like masters that hang, so look asks
// again while the state is unknown.
func (s *servers) look(index int, name string) *api.LockStatus {
	s.t.Helper()
	var status *api.LockStatus
	eventually(s.t, "the state of "+name, func() bool {
		answer, err := s.plain(index).GetLockWithResponse(context.Background(), name, nil)
		must(s.t, err)
		if status = answer.JSON200; status == nil {
			s.t.Fatalf("GET %s: %s", name, answer.Body)
		}
		return status.State != api.LockStateUnknown
	})
	return status
}

// awaited waits until somebody waits for a lock at a gateway.
func (s *servers) awaited(index int, name string) {
	s.t.Helper()
	eventually(s.t, "somebody waits", func() bool {
		status := s.look(index, name)
		return status.WaitersTotal != nil && *status.WaitersTotal > 0
	})
}

// takeAway releases somebody else's lock by its token.
func (s *servers) takeAway(guard *redlock.Guard) {
	s.t.Helper()
	token := guard.Token()
	params := &api.ReleaseLockParams{LockToken: &token}
	// On a busy machine the masters may not answer in time (503). Asked again, by the gateway or
	// here, they may have released the lock already (404).
	eventually(s.t, "an answer", func() bool {
		answer, err := s.plain(1).ReleaseLockWithResponse(context.Background(), guard.Name(), params)
		must(s.t, err)
		status := answer.StatusCode()
		if status != http.StatusNoContent && status != http.StatusNotFound && status != http.StatusServiceUnavailable {
			s.t.Fatalf("DELETE %s: %s", guard.Name(), answer.Body)
		}
		return status != http.StatusServiceUnavailable
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// closed waits until a channel is closed.
func closed(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s: not within %v", what, patience)
	}
}

// eventually waits until it is so.
func eventually(t *testing.T, what string, isSo func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !isSo(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// extended waits until so many extensions have been confirmed.
func extended(t *testing.T, guard *redlock.Guard, times int) {
	t.Helper()
	for range times {
		before := guard.Deadline()
		eventually(t, "an extension", func() bool {
			must(t, guard.Check())
			return guard.Deadline() > before
		})
	}
}
