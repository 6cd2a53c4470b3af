// Prints the vector of each text as a line of JSON: go run . localhost:50051 "I understand this" "and that"
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"log"
	"math"
	"os"
	"time"

	encservev1 "encserve/v1"

	"google.golang.org/grpc"
)

// The library's own bound on answers is 4 MiB; the server's default is 64.
const maxResponseBytes = 64 << 20

func main() {
	if len(os.Args) < 3 {
		log.Fatal("usage: encode ADDRESS TEXT...")
	}
	texts := os.Args[2:]
	limit := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxResponseBytes))
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), limit)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	request := &encservev1.EncodeRequest{Options: &encservev1.EncodeOptions{
		Outputs: []*encservev1.OutputSpec{{Kind: encservev1.OutputKind_OUTPUT_KIND_MODEL_POOLING}},
	}}
	for _, text := range texts {
		input := &encservev1.Input{Input: &encservev1.Input_Text{Text: text}}
		request.Inputs = append(request.Inputs, input)
	}
	response, err := encservev1.NewEncoderServiceClient(connection).Encode(ctx, request)
	if err != nil {
		log.Fatal(err)
	}
	tensor := response.Outputs[0]
	vector := make([]float32, tensor.Width)
	lines := json.NewEncoder(os.Stdout)
	for i, text := range texts {
		row := tensor.Data[4*i*len(vector):] // little-endian float32, one row after another
		for j := range vector {
			vector[j] = math.Float32frombits(binary.LittleEndian.Uint32(row[4*j:]))
		}
		if err := lines.Encode(map[string]interface{}{"text": text, "vector": vector}); err != nil {
			log.Fatal(err)
		}
	}
}
