package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"
)

// ttlMS is the time to live of each lock. No lock lives long enough to reach its end.
const ttlMS = 120_000

// cycles is how often a client tries to acquire one lock.
const cycles = 6

// pause is how long a client waits after an unknown outcome.
const pause = 50 * time.Millisecond

// client sends requests about one lock, and records them.
type client struct {
	number   int
	lock     string
	gateways []string
	http     *http.Client
	random   *rand.Rand
	began    time.Time
	history  *history
	// odd has answers that the model does not know.
	odd func(string)
}

// call sends one request to a gateway that it draws. It returns the status and the body of the answer.
// Without an answer, the status is 0.
func (c *client) call(
	method string, headers map[string]string, body any,
) (int, map[string]any, error) {
	var sent io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return 0, nil, err
		}
		sent = bytes.NewReader(text)
	}
	url := c.gateways[c.random.IntN(len(c.gateways))] + "/locks/" + c.lock
	asked, err := http.NewRequest(method, url, sent)
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		asked.Header.Set("Content-Type", "application/json")
	}
	for name, value := range headers {
		asked.Header.Set(name, value)
	}
	got, err := c.http.Do(asked)
	if err != nil {
		return 0, nil, nil
	}
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	if err != nil {
		return 0, nil, nil
	}
	var answer map[string]any
	if len(text) > 0 {
		if err := json.Unmarshal(text, &answer); err != nil {
			return 0, nil, fmt.Errorf("%s %s: %w: %q", method, url, err, text)
		}
	}
	return got.StatusCode, answer, nil
}

// outcomeOf translates a status. The code of a 409 says who holds the lock.
func outcomeOf(status int, body map[string]any) (outcome, bool) {
	switch status {
	case 0, 503:
		return unknown, true
	case 200, 201:
		return granted, true
	case 204:
		return released, true
	case 404:
		return notHeld, true
	case 409:
		if body["code"] == "not_holder" {
			return notHeld, true
		}
		return held, body["code"] == "lock_held"
	}
	return unknown, false
}

func fencing(body map[string]any) int64 {
	number, _ := body["fencing_token"].(float64)
	return int64(number)
}

// ask sends a request and records it. It returns the answer.
func (c *client) ask(kind kind, owner, token string, key bool) (answer, map[string]any) {
	method := []string{"POST", "PATCH", "DELETE", "GET"}[kind]
	headers := map[string]string{}
	var body any
	switch kind {
	case acquire:
		asked := map[string]any{"ttl_ms": ttlMS, "owner": owner}
		if c.random.IntN(3) == 0 {
			asked["wait_ms"] = c.random.IntN(400)
		}
		body = asked
		if key {
			headers["Idempotency-Key"] = "histories-of-" + owner + "-" + c.lock
		}
	case extend:
		headers["Lock-Token"], body = token, map[string]any{"ttl_ms": ttlMS}
	case release:
		headers["Lock-Token"] = token
	}
	call := int64(time.Since(c.began))
	status, got, err := c.call(method, headers, body)
	end := int64(time.Since(c.began))
	if err != nil {
		c.odd(err.Error())
	}
	result, isKnown := outcomeOf(status, got)
	if kind == get && status == 200 {
		switch got["state"] {
		case "held":
			result = held
		case "free":
			result = notHeld
		default:
			result = unknown
		}
	}
	if !isKnown {
		c.odd(fmt.Sprintf("%s: %d %v", method, status, got))
	}
	if result == unknown {
		time.Sleep(pause)
	}
	answered := answer{result, fencing(got)}
	if kind == extend {
		// The answer to a PATCH has no token's number, so the grant's stands for it.
		answered.fencing = c.fencingOf(token)
	}
	if result == notHeld {
		answered.fencing = 0
	}
	c.history.record(c.number, request{kind, c.lock, owner}, answered, call, end)
	return answered, got
}

// fencingOf reads the fencing token in a lock token, `1.<fencing token>.<secret>`.
func (c *client) fencingOf(token string) int64 {
	var version string
	var number int64
	if _, err := fmt.Sscanf(token, "%1s.%d.", &version, &number); err != nil {
		c.odd(fmt.Sprintf("the token %q: %v", token, err))
	}
	return number
}

// run acquires, extends and releases the lock a few times.
func (c *client) run(group *sync.WaitGroup) {
	defer group.Done()
	for cycle := range cycles {
		if c.history.unknowns() >= mostUnknowns {
			return
		}
		owner := fmt.Sprintf("%d-%d", c.number, cycle)
		key := c.random.IntN(2) == 0
		got, body := c.ask(acquire, owner, "", key)
		for tries := 0; key && got.outcome == unknown && tries < 2; tries++ {
			got, body = c.ask(acquire, owner, "", key)
		}
		if got.outcome != granted {
			c.ask(get, "", "", false)
			continue
		}
		token, _ := body["token"].(string)
		for c.random.IntN(2) == 0 {
			c.ask(extend, owner, token, false)
		}
		if key && c.random.IntN(3) == 0 {
			c.ask(acquire, owner, "", key)
		}
		c.ask(get, "", "", false)
		for range 1 + c.random.IntN(2) {
			c.ask(release, owner, token, false)
		}
	}
}
